"""The forward of the selected branch: a tile of neighbouring queries over the union of their blocks.

A consumer warpgroup has the query heads of a group for some queries, 64 rows in all. The producer copies the blocks of
keys and values that some query of the tile lists, each once, and every consumer computes those that its own queries
list: rows of a query that does not list a block are masked. So keys are read from the L2 cache once for the queries of
three warpgroups, and multiplied with the queries of one. Over the blocks so far, a row has

    m = max_j s_j,    l = Σ_j exp(s_j − m),    acc = Σ_j exp(s_j − m)·v_j,

and at the end o = acc / l and lse = m + log l. Keys past the end of a block of a union may be NaN: their values are
zeroed.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._native_sparse import Unions, lists_of
from ejkernel.kernels._triton.native_sparse_attention.unions import unions_of
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._inline.registers import compare_columns
from .._inline.rows import TILE_COLUMNS, store_rows, zero_rows
from .._launch import (
    PER_ROW,
    ROWS,
    WGMMA,
    accumulator,
    arrive,
    broadcast_rows,
    full,
    launch,
    shared,
    stage_of,
    sync,
    times_rows,
    whole_eights,
)
from ..flash_attention.plan import REGISTERS
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import COLUMNS, LIMITS, LOWEST, Statistics, weights
from .configs import BLOCK_K
from .plan import EMPTY, Plan, plan_of

# The greatest weight of a row is 1, which rounding leaves alone: a row whose weight is all on one key has its values.
EXACT_MAXIMA = LIMITS._replace(rescale_threshold=0)


class Shared(NamedTuple):
    """Shared memory of a thread block: q, k, v, and the full barriers."""

    q_tiles: Any
    k_tiles: Any
    v_tiles: Any
    q_full: Any
    full: Any


class Step(NamedTuple):
    """A block of 64 keys of a tile: its first key, where those that some query sees stop, and whose list has it."""

    first: Array
    stop: Array
    members: Array


def native_sparse_attention(*operands: Array | None, spec: NativeSparseAttentionSpec, config: KernelConfig) -> Outputs:
    """o, the attention to the keys of listed blocks, and lse, the logsumexp of each row of logits."""
    x = Operands(*operands)
    plan = plan_of(x, spec, config)
    unions = unions_of(lists_of(x, plan.size), plan.queries, plan.size)
    rows = plan.consumers * ROWS
    q_tile = (1, plan.queries, plan.heads, TILE_COLUMNS)
    of_tokens = lambda a: whole_eights(a).reshape(-1, *a.shape[2:])
    o, lse = launch(
        partial(_kernel, plan=plan),
        "native_sparse_attention",
        (x.q.reshape(plan.B * plan.S, plan.H, plan.D), of_tokens(x.k), of_tokens(x.v), unions._replace(slots=None)),
        out_type=(
            jax.ShapeDtypeStruct((plan.B * plan.S, plan.H, plan.V), plan.dtype),
            jax.ShapeDtypeStruct((plan.B * plan.S, plan.H), jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=plan.warpgroups,
        scratch=dict(
            q_tiles=plgpu.RefUnion(
                tuple(shared((1, rows, TILE_COLUMNS), plan.dtype) for _ in range(plan.parts)),
                tuple(
                    plgpu.SMEM(q_tile, plan.dtype, transforms=(plgpu.SwizzleTransform(128),)) for _ in range(plan.parts)
                ),
            ),
            k_tiles=shared((plan.stages, BLOCK_K, plan.D), plan.dtype),
            v_tiles=shared((plan.stages, BLOCK_K, plan.V), plan.dtype),
            q_full=plgpu.Barrier(num_arrivals=plan.parts),
            full=plgpu.Barrier(num_barriers=plan.stages, num_arrivals=2),
        ),
    )
    lse = jnp.moveaxis(lse.reshape(plan.B, plan.S, plan.H), 1, 2)
    return Outputs(o.reshape(plan.B, plan.S, plan.H, plan.V), lse)


def _kernel(q, k, v, unions: Unions, o, lse, *, plan: Plan, **scratch):
    tiles, number, (batch, group, tile) = Shared(**scratch), lax.axis_index("warpgroup"), plan.place()
    steps = unions.count[batch, tile, group] * plan.steps_of_entry
    step_of = partial(_step_of, unions, (batch, tile, group), plan)
    query = tile * plan.queries

    def consume():
        first = number * plan.queries_of_warpgroup
        acc, last = _mainloop(tiles, step_of, steps, number, query + first, plan)
        rows = (plan.S - query - first) * plan.heads
        _store(o, lse, acc, last, batch * plan.S + query + first, rows, group, plan)

    def produce():
        plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="decrease")
        token = batch * plan.S + query
        for part, target in enumerate(tiles.q_tiles[1]):
            heads, columns = pl.ds(group * plan.heads, plan.heads), pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)
            source = q.at[pl.ds(token, plan.queries), heads, columns]
            plgpu.copy_gmem_to_smem(source, target.at[0], tiles.q_full)
        _load_keys(tiles, k, v, step_of, steps, batch, group, plan)

    lax.cond(number < plan.consumers, consume, produce)


def _step_of(unions: Unions, place: tuple[Array, Array, Array], plan: Plan, n: Array) -> Step:
    """The n-th step of a tile; after the last there is none to compute, but one to read."""
    entry = jnp.minimum(lax.div(n, jnp.int32(plan.steps_of_entry)), unions.begin.shape[3] - 1)
    first, stop, members = (x[*place, entry] for x in (unions.begin, unions.end, unions.members))
    return Step(first + lax.rem(n, jnp.int32(plan.steps_of_entry)) * BLOCK_K, stop, members)


def _load_keys(tiles: Shared, k, v, step_of, steps: Array, batch: Array, group: Array, plan: Plan) -> None:
    """The producer: blocks of keys and values into the stages as they become empty."""

    def load(n, step):
        stage, rows = stage_of(n, plan.stages), pl.ds(batch * plan.key_rows + step.first, BLOCK_K)
        after = step_of(n + 1)
        sync(EMPTY + stage, plan.warpgroups)
        plgpu.copy_gmem_to_smem(k.at[rows, group], tiles.k_tiles.at[stage], tiles.full.at[stage])
        plgpu.copy_gmem_to_smem(v.at[rows, group], tiles.v_tiles.at[stage], tiles.full.at[stage])
        return after

    lax.fori_loop(0, steps, load, step_of(jnp.int32(0)))


def _mainloop(
    tiles: Shared, step_of, steps: Array, number: Array, query: Array, plan: Plan
) -> tuple[Array, Statistics]:
    """acc and the row statistics of the rows of a consumer warpgroup, whose first query is `query`."""
    plgpu.set_max_registers(REGISTERS[plan.consumers][0], action="increase")
    for stage in range(plan.stages):
        arrive(EMPTY + stage, plan.warpgroups)
    plgpu.barrier_wait(tiles.q_full)
    everyone, first_member = 2**plan.queries_of_warpgroup - 1, number * plan.queries_of_warpgroup

    def one(n, carry):
        acc, previous, step = carry
        after, stage = step_of(n + 1), stage_of(n, plan.stages)
        members = lax.shift_right_logical(step.members, first_member) & everyone
        plgpu.barrier_wait(tiles.full.at[stage])

        def compute(acc, *previous):
            s = _logits(tiles, stage, number, step, members, query, plan)
            p, now, alpha = weights(s, Statistics(*previous), None, plan.exponent, 0, EXACT_MAXIMA)
            acc, p = times_rows(acc, alpha), p.astype(plan.dtype)
            hidden = step.stop - step.first < BLOCK_K
            pl.when(hidden)(lambda: zero_rows(tiles.v_tiles.at[stage], jnp.int32(0), step.stop - step.first))
            values = lambda acc: plgpu.wgmma(acc, p, tiles.v_tiles.at[stage])
            return pl.run_state(values)(plgpu.ACC.init(acc)), *now

        computes = (members != 0) & (step.first < step.stop)
        acc, *now = lax.cond(computes, compute, lambda *unchanged: unchanged, acc, *previous)
        arrive(EMPTY + stage, plan.warpgroups)
        return acc, Statistics(*now), after

    acc, none = full((ROWS, plan.V), 0.0, WGMMA), full((ROWS, COLUMNS), 0.0, WGMMA)
    start = acc, Statistics(full((ROWS,), LOWEST, PER_ROW), none), step_of(jnp.int32(0))
    acc, last, _ = lax.fori_loop(0, steps, one, start)
    return acc, last


def _logits(tiles: Shared, stage: Array, number: Array, step: Step, members: Array, query: Array, plan: Plan) -> Array:
    """q·kᵀ of a block, −∞ where a row's query does not list it or does not see the key."""

    def product(s):
        for part, q in enumerate(tiles.q_tiles[0]):
            k = tiles.k_tiles.at[stage, :, pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)]
            plgpu.wgmma(s, q.at[0, pl.ds(number * ROWS, ROWS)], k.T)
        return s[...]

    def masked(s):
        of_rows = plan.query_of_rows()
        stop = jnp.minimum(plan.limit(query + of_rows), step.stop) - step.first
        is_member = lax.shift_right_logical(full((ROWS,), members, PER_ROW, jnp.int32), of_rows) & 1
        return jnp.where(compare_columns("slt", stop * is_member, s.shape), s, -jnp.inf)

    s = pl.run_scoped(product, accumulator(ROWS, BLOCK_K))
    everyone = 2**plan.queries_of_warpgroup - 1
    sees_all = (members == everyone) & (step.first + BLOCK_K <= jnp.minimum(plan.limit(query), step.stop))
    return lax.cond(sees_all, lambda s: s, masked, s)


def _store(o, lse, acc: Array, last: Statistics, token: Array, rows: Array, group: Array, plan: Plan) -> None:
    """The epilogue: o = acc / l and lse of the rows of a warpgroup, from its registers to device memory."""
    total = last.total.sum(axis=1)
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    of_rows = jnp.where(saw, (last.maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    tile = (acc * broadcast_rows(1 / total, acc)).astype(o.dtype)
    store_rows(o, tile, token, rows, group * plan.heads, lse, of_rows, plan.heads)
