"""Tiles of 16 or 32 rows: operands are swapped, so that q is the N dimension of both products (CUTLASS's swap AB).

The M dimension of wgmma is 64, of which 16 heads of one token would use a quarter; the N dimension is a multiple of 8.
So k and v are the A operands:

    sᵀ = k·qᵀ [keys, rows],    p = exp(s − m),    oᵀ += vᵀ·pᵀ [features, rows].

Such a product is bound by reading A from shared memory, which takes twice the time of its multiplications, and half of
the time of a product with 64 rows of q. acc takes 4 registers of each thread for each row of q, so that either consumer
warpgroup holds all features and computes every second tile by itself, in a stage of its own: they synchronize only in
the epilogue. The kernel is then bound by memory, with a copy into one of the two stages nearly always in flight.

The maximum of a row is over keys, which are in all warps: these exchange it in shared memory. The sums of weights stay
with their threads until the end. There each warpgroup merges half of the features:

    m = max(m_0, m_1),    l = Σ_w l_w·exp(m_w − m),    o = Σ_w acc_w·exp(m_w − m) / l.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.columns import (
    load_registers_from_smem,
    reduce_columns,
    scratch_of_columns,
    store_columns,
    store_registers_to_smem,
    store_transposed,
)
from .._inline.rows import TILE_COLUMNS
from .._launch import (
    PER_COLUMN,
    PER_ROW,
    WGMMA,
    accumulator,
    arrive,
    broadcast_columns,
    full,
    load_vector,
    opaque_copy,
    sync,
    times_rows,
    warp_any,
)
from .._launch import (
    shared as swizzled_smem,
)
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import LOWEST, logits
from ..ragged_page_attention.work import WorkTile
from . import lists, pages
from .factors import factors_of_rows, round_queries, scale_of_all
from .plan import BLOCK_K, HALF, K_EMPTY, SUMS, Keys, Plan


class Shared(NamedTuple):
    """Shared memory of a thread block: q, k, the weights, the row maxima and sums, the full barriers, the scales of k,
    and what makes logits of rounded queries right.
    """

    q: Any
    k_latent: Any
    k_rope: Any
    p: Any
    exchanged: Any
    maxima: Any
    sums: Any
    q_full: Any
    k_full: Any
    k_scales: Any = None
    q_factors: Any = None


class Carry(NamedTuple):
    """What the mainloop carries: acc, oᵀ of both halves of the features; the row maxima m; partial sums of p."""

    halves: tuple[Array, Array]
    maximum: Array
    total: Array


def scratch(plan: Plan) -> dict[str, Any]:
    """The memory of `Shared`, but for q, k, their factors and the barriers."""
    return dict(
        p=swizzled_smem((2, plan.rows, BLOCK_K), plan.dtype_of_products),
        exchanged=plgpu.SMEM((2, *scratch_of_columns(plan.rows)), jnp.float32),
        maxima=plgpu.SMEM((2, plan.rows), jnp.float32),
        sums=plgpu.SMEM((2, plan.rows), jnp.float32),
    )


def consume(
    shared: Shared, keys: Keys, o, lse, work_tile: WorkTile, first: Array, pairs: Array, row: Array, part: Array,
    heads: Array, plan: Plan, number: int,
) -> None:  # fmt: skip
    """Consumer warpgroup `number`: every second tile of keys, and at the end half of the features of o."""
    plgpu.set_max_registers(plan.registers[0], action="increase")
    arrive(K_EMPTY + number, plan.warpgroups_of_stage)
    plgpu.barrier_wait(shared.q_full)
    if plan.rounds_queries:
        round_queries(shared, number, plan)
    factors = factors_of_rows(shared, keys, plan, PER_COLUMN)
    zeros = partial(full, value=0.0, layout=WGMMA)
    start = Carry(
        (zeros((HALF, plan.rows)), zeros((HALF, plan.rows))),
        full((plan.rows,), LOWEST, PER_COLUMN),
        zeros((BLOCK_K, plan.rows)),
    )
    last = lax.fori_loop(0, pairs, partial(_step, shared, keys, work_tile, first, factors, plan, number), start)
    total = reduce_columns("add", last.total, shared.exchanged.at[number])
    store_registers_to_smem(shared.k_latent.at[number], last.halves[1 - number])  # nothing more comes to this stage
    shared.maxima[number], shared.sums[number] = last.maximum, total
    sync(SUMS, 2)
    other_maximum = load_vector(shared.maxima.at[1 - number], PER_COLUMN)
    maximum = jnp.maximum(last.maximum, other_maximum)
    alpha, other_alpha = jnp.exp2(last.maximum - maximum), jnp.exp2(other_maximum - maximum)
    total = total * alpha + load_vector(shared.sums.at[1 - number], PER_COLUMN) * other_alpha
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    of_rows = jnp.where(saw, (maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    scale = scale_of_all(keys, plan)
    inverse = (1 if scale is None else scale) / total
    acc = _times(last.halves[number], alpha * inverse)
    acc += _times(load_registers_from_smem(shared.k_latent.at[1 - number], acc), other_alpha * inverse)
    out = part * (lse.shape[0] // plan.splits) + row
    store_columns(o, lse, acc.astype(o.dtype), of_rows, out, plan.count(work_tile, heads), number)


def _step(
    shared: Shared, keys: Keys, work_tile: WorkTile, first: Array, factors: Array | None, plan: Plan, number: int,
    pair: Array, previous: Carry,
) -> Carry:  # fmt: skip
    """The carry after this warpgroup's tile of a pair of tiles of keys."""
    s = _logits(shared, keys, work_tile, first, factors, plan, number, pair)
    greatest = reduce_columns("max", s, shared.exchanged.at[number]) * plan.exponent
    maximum = jnp.maximum(previous.maximum, greatest)
    alpha = jnp.exp2(previous.maximum - maximum)
    p = jnp.exp2(s * plan.exponent - broadcast_columns(maximum, s))
    store_transposed(shared.p.at[number], _scaled(shared, number, p).astype(shared.p.dtype))
    plgpu.commit_smem()
    total = _times(previous.total, alpha) + p
    halves = lax.cond(
        warp_any(alpha != 1, PER_COLUMN),
        lambda *halves: tuple(_times(acc, alpha) for acc in halves),
        lambda *halves: halves,
        *previous.halves,
    )

    def values(accs):
        again = opaque_copy(number)
        for half, acc in enumerate(accs):
            v = shared.k_latent.at[again, :, pl.ds(half * HALF, HALF)]
            plgpu.wgmma(acc, v.T, shared.p.at[again].T)

    halves = pl.run_state(values)(tuple(map(plgpu.ACC.init, halves)))
    arrive(K_EMPTY + number, plan.warpgroups_of_stage)
    return Carry(tuple(halves), maximum, total)


def _logits(
    shared: Shared, keys: Keys, work_tile: WorkTile, first: Array, factors: Array | None, plan: Plan, number: int,
    pair: Array,
) -> Array:  # fmt: skip
    """The logits of this warpgroup's tile of a pair, [keys, rows], without `plan.exponent`, −∞ where they are masked.

    The addresses of operands come from `opaque_copy`: kept in registers over the loop, they would be spilled.
    """
    tile = first + 2 * pair + number
    source = lists if plan.lists else pages
    is_masked = source.await_tile(shared, keys, work_tile, tile, pair, number, plan)

    def product(s):
        again, zero = opaque_copy(number), opaque_copy(0)
        for part, q in enumerate(shared.q[0]):
            columns = pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)
            k = shared.k_rope.at[again] if part == plan.parts - 1 else shared.k_latent.at[again, :, columns]
            plgpu.wgmma(s, k, q.at[zero].T)
        return s[...]

    s = _scaled(shared, number, pl.run_scoped(product, accumulator(BLOCK_K, plan.rows)))
    if factors is not None:
        s = _times(s, factors)
    if plan.softcap is not None:
        s = logits(s, plan.problem)
    masked = partial(source.hide_rows, keys=keys, work_tile=work_tile, tile=tile, plan=plan)
    return lax.cond(is_masked, masked, lambda s: s, s)


def _scaled(shared: Shared, number: int, tile: Array) -> Array:
    """A tile [keys, rows] times the scales of its keys, if they have some."""
    return tile if shared.k_scales is None else times_rows(tile, load_vector(shared.k_scales.at[number], PER_ROW))


def _times(tile: Array, factors: Array) -> Array:
    """A tile times a factor for each column."""
    return tile * broadcast_columns(factors, tile)
