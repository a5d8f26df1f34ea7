"""Tiles of 16 or 32 rows: q stands where products have their columns, so that few rows fill them.

A product of Hopper has 64 rows, of which the heads of one token may be 16; columns it has from 8 on. So a tile of keys
is the first operand of both products:

    sᵀ = k·qᵀ [keys, rows],    p = exp(s − m),    oᵀ += vᵀ·pᵀ [features, rows].

A product of these takes what its first operand takes from shared memory, twice the time of its multiplications, and
half of that of 64 rows. acc of all features has 4 registers a thread for each row, so that either consumer warpgroup
computes every second tile by itself, in a stage of its own: they wait for one another only at the end. It is the memory
that they wait for then, with one of the two stages under way nearly always.

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

from .._inline.columns import leave, reduce_columns, scratch_of_columns, store_columns, store_transposed, take
from .._inline.rows import TILE_COLUMNS, zero_rows
from .._launch import (
    PER_COLUMN,
    WGMMA,
    accumulator,
    arrive,
    broadcast_columns,
    full,
    in_warp,
    indices,
    load_vector,
    opaque_copy,
    shared,
    sync,
)
from ..flash_attention.plan import REGISTERS
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import logits
from ..ragged_page_attention.work import WorkTile
from .plan import BLOCK_K, HALF, K_EMPTY, LOWEST, SUMS, Plan


class Tiles(NamedTuple):
    """Shared memory of a thread block: q, k, the weights, the row maxima and sums, and the full barriers."""

    q: Any
    k_latent: Any
    k_rope: Any
    p: Any
    exchanged: Any
    maxima: Any
    sums: Any
    q_full: Any
    k_full: Any


class Carry(NamedTuple):
    """What a warpgroup has of its tiles so far: oᵀ of both halves of the features, m, and the threads' sums of p."""

    halves: tuple[Array, Array]
    maximum: Array
    total: Array


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """The memory of `Tiles`, but for q, k and the barriers."""
    return dict(
        p=shared((2, plan.rows, BLOCK_K), dtype),
        exchanged=plgpu.SMEM((2, *scratch_of_columns(plan.rows)), jnp.float32),
        maxima=plgpu.SMEM((2, plan.rows), jnp.float32),
        sums=plgpu.SMEM((2, plan.rows), jnp.float32),
    )


def consume(
    tiles: Tiles, o, lse, of: WorkTile, first: Array, pairs: Array, row: Array, part: Array, heads: Array,
    plan: Plan, number: int,
) -> None:  # fmt: skip
    """Consumer warpgroup `number`: every second tile of keys, and at the end half of the features of o."""
    plgpu.set_max_registers(REGISTERS[2][0], action="increase")
    arrive(K_EMPTY + number, plan.warpgroups_of_stage)
    plgpu.barrier_wait(tiles.q_full)
    zeros = partial(full, value=0.0, layout=WGMMA)
    start = Carry(
        (zeros((HALF, plan.rows)), zeros((HALF, plan.rows))),
        full((plan.rows,), LOWEST, PER_COLUMN),
        zeros((BLOCK_K, plan.rows)),
    )
    last = lax.fori_loop(0, pairs, partial(_step, tiles, of, first, plan, number), start)
    total = reduce_columns("add", last.total, tiles.exchanged.at[number])
    leave(tiles.k_latent.at[number], last.halves[1 - number])  # nothing more comes to this stage
    tiles.maxima[number], tiles.sums[number] = last.maximum, total
    sync(SUMS, 2)
    of_other = load_vector(tiles.maxima.at[1 - number], PER_COLUMN)
    maximum = jnp.maximum(last.maximum, of_other)
    mine, others = jnp.exp2(last.maximum - maximum), jnp.exp2(of_other - maximum)
    total = total * mine + load_vector(tiles.sums.at[1 - number], PER_COLUMN) * others
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    of_rows = jnp.where(saw, (maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    acc = _times(last.halves[number], mine / total)
    acc += _times(take(tiles.k_latent.at[1 - number], acc), others / total)
    out = part * (lse.shape[0] // plan.splits) + row
    store_columns(o, lse, acc.astype(o.dtype), of_rows, out, plan.count(of, heads), number)


def _step(tiles: Tiles, of: WorkTile, first: Array, plan: Plan, number: int, pair: Array, before: Carry) -> Carry:
    """The carry after the tile of keys that this warpgroup computes of a pair of tiles."""
    s = _logits(tiles, of, first + 2 * pair + number, plan, number)
    greatest = reduce_columns("max", s, tiles.exchanged.at[number]) * plan.exponent
    maximum = jnp.maximum(before.maximum, greatest)
    alpha = jnp.exp2(before.maximum - maximum)
    p = jnp.exp2(s * plan.exponent - broadcast_columns(maximum, s))
    store_transposed(tiles.p.at[number], p.astype(tiles.p.dtype))
    plgpu.commit_smem()
    total = _times(before.total, alpha) + p
    halves = lax.cond(
        in_warp(alpha != 1, PER_COLUMN),
        lambda *halves: tuple(_times(acc, alpha) for acc in halves),
        lambda *halves: halves,
        *before.halves,
    )

    def values(accs):
        again = opaque_copy(number)
        for half, acc in enumerate(accs):
            v = tiles.k_latent.at[again, :, pl.ds(half * HALF, HALF)]
            plgpu.wgmma(acc, v.T, tiles.p.at[again].T)

    halves = pl.run_state(values)(tuple(map(plgpu.ACC.init, halves)))
    arrive(K_EMPTY + number, plan.warpgroups_of_stage)
    return Carry(tuple(halves), maximum, total)


def _logits(tiles: Tiles, of: WorkTile, tile: Array, plan: Plan, number: int) -> Array:
    """The logits of a tile, [keys, rows], without the factor `plan.exponent`, −∞ where they are masked.

    The addresses of products are computed again each time: kept in registers, they are spilled.
    """
    plgpu.barrier_wait(tiles.k_full.at[number])
    begin, end = of.first_key - tile * BLOCK_K, of.stop - tile * BLOCK_K
    hides = (begin > 0) | (end < BLOCK_K)
    pl.when(hides)(lambda: zero_rows(tiles.k_latent.at[number], begin, end))

    def product(s):
        again, zero = opaque_copy(number), opaque_copy(0)
        for part, q in enumerate(tiles.q[0]):
            columns = pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)
            k = tiles.k_rope.at[again] if part == plan.parts - 1 else tiles.k_latent.at[again, :, columns]
            plgpu.wgmma(s, k, q.at[zero].T)
        return s[...]

    s = pl.run_scoped(product, accumulator(BLOCK_K, plan.rows))
    if plan.softcap is not None:
        s = logits(s, plan.problem)
    position = of.position - tile * BLOCK_K
    cut = hides | (position < BLOCK_K - 1)
    if plan.window is not None:
        cut |= position + of.tokens - plan.window > 0
    return lax.cond(cut, lambda s: jnp.where(_visible(position, end, plan), s, -jnp.inf), lambda s: s, s)


def _visible(position: Array, end: Array, plan: Plan) -> Array:
    """Which keys of a tile the rows see; `position` of their first token and `end` of the keys count from the tile."""
    row = plgpu.broadcasted_iota(jnp.int32, (plan.rows,), 0, layout=PER_COLUMN)
    at = position + (lax.div(row, jnp.int32(plan.H)) if plan.tokens > 1 else 0 * row)
    key = indices(jnp.int32(0), 0, (BLOCK_K, plan.rows))
    ok = key <= broadcast_columns(jnp.minimum(at, end - 1), key)
    if plan.window is not None:
        ok &= key >= broadcast_columns(at - (plan.window - 1), key)
    return ok


def _times(tile: Array, factors: Array) -> Array:
    """A tile times a factor for each column."""
    return tile * broadcast_columns(factors, tile)
