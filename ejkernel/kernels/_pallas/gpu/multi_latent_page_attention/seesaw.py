"""Tiles of 64 rows: two consumer warpgroups have 256 columns of o each, and one of every two tiles of logits.

They have 128 registers a thread for o. The logits of even tiles are computed by warpgroup 0, those of odd tiles by
warpgroup 1 (the seesaw of FlashMLA). For tile t its owner computes

    s = q·k_tᵀ,    m' = max(m, max_j s_j),    p = exp(s − m'),

and leaves p and m' in shared memory, p in place of the rotary parts of its keys, which are no more needed. Both
warpgroups rescale their acc by exp(m − m') and add p·v_t of their columns.
While warpgroup 0 computes the softmax of tile t, q·kᵀ of tile t + 1 is under way in warpgroup 1, and while that
computes its softmax, p·v of tile t is under way.

A stage is empty when both warpgroups have multiplied with it. The owner of the next tile in a stage waits for its
copies, so it also knows that the other warpgroup has read what it left of the tile before: p and m need no barrier of
their own.

Slots that no token sees may hold NaN: the owner of a tile zeroes them before its product.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    load_vector,
    opaque_copy,
    sync,
    times_rows,
)  # fmt: skip
from ..flash_attention.plan import REGISTERS
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import COLUMNS, LIMITS, Statistics, logits, weights
from ..ragged_page_attention.work import WorkTile
from .plan import BLOCK_K, HALF, K_EMPTY, LOWEST, P_FULL, STAGES, SUMS, Plan


class Tiles(NamedTuple):
    """Shared memory of a thread block: q, k, the row maxima and sums, and the full barriers."""

    q: Any
    k_latent: Any
    k_rope: Any
    maxima: Any
    sums: Any
    q_full: Any
    k_full: Any


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """The memory of `Tiles`, but for q, k and the barriers."""
    del plan, dtype
    return dict(maxima=plgpu.SMEM((2, ROWS), jnp.float32), sums=plgpu.SMEM((2, ROWS), jnp.float32))


def consume(
    tiles: Tiles, o, lse, of: WorkTile, first: Array, pairs: Array, row: Array, part: Array, heads: Array,
    plan: Plan, number: int,
) -> None:  # fmt: skip
    """Consumer warpgroup `number`: the logits of every second tile of keys, and half of the columns of o."""
    plgpu.set_max_registers(REGISTERS[2][0], action="increase")
    for stage in range(STAGES):
        arrive(K_EMPTY + stage, plan.warpgroups_of_stage)
    plgpu.barrier_wait(tiles.q_full)
    step = partial((_even_first, _odd_second)[number], tiles, of, first, plan)
    start = Statistics(full((ROWS,), LOWEST, PER_ROW), full((ROWS, COLUMNS), 0.0, WGMMA))
    acc, last = lax.fori_loop(0, pairs, step, (full((ROWS, HALF), 0.0, WGMMA), start))
    total = last.total.sum(axis=1)
    tiles.sums[number] = total
    plgpu.commit_smem()
    sync(SUMS, 2)
    total = total + load_vector(tiles.sums.at[1 - number], PER_ROW)
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    of_rows = jnp.where(saw, (last.maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    out = part * (lse.shape[0] // plan.splits) + row
    store_rows(
        o,
        (acc * broadcast_rows(1 / total, acc)).astype(o.dtype),
        out,
        plan.count(of, heads),
        jnp.int32(number),
        lse,
        of_rows,
    )


def _even_first(tiles: Tiles, of: WorkTile, first: Array, plan: Plan, pair: Array, carry: tuple) -> tuple:
    """Warpgroup 0: the softmax of the even tile of a pair, then p·v of both."""
    acc, before = carry
    s = _logits(tiles, 0, of, first + 2 * pair, plan)
    p, after, alpha = weights(s, before, None, plan.exponent, 0, LIMITS)
    _publish(tiles, 0, p, after.maximum)
    arrive(P_FULL, 2)
    acc = _plus_values(tiles, 0, 0, times_rows(acc, alpha))
    arrive(K_EMPTY, plan.warpgroups_of_stage)
    sync(P_FULL + 1, 2)
    acc, after = _rescaled(tiles, 1, acc, after)
    acc = _plus_values(tiles, 1, 0, acc)
    arrive(K_EMPTY + 1, plan.warpgroups_of_stage)
    return acc, after


def _odd_second(tiles: Tiles, of: WorkTile, first: Array, plan: Plan, pair: Array, carry: tuple) -> tuple:
    """Warpgroup 1: p·v of the even tile of a pair under the softmax of the odd one, then p·v of that."""
    acc, before = carry
    s = _logits(tiles, 1, of, first + 2 * pair + 1, plan)
    sync(P_FULL, 2)
    acc, before = _rescaled(tiles, 0, acc, before)

    def both(refs):
        acc, maximum, total, factor = refs
        _issue_values(tiles, 0, 1, acc)
        p, after, alpha = weights(s, before, None, plan.exponent, 0, LIMITS)
        _publish(tiles, 1, p, after.maximum)
        arrive(P_FULL + 1, 2)
        maximum[...], total[...], factor[...] = after.maximum, after.total, alpha
        plgpu.wgmma_wait(0)

    acc, *after, alpha = pl.run_state(both)((plgpu.ACC.init(acc), *before, before.maximum))
    arrive(K_EMPTY, plan.warpgroups_of_stage)
    acc = _plus_values(tiles, 1, 1, times_rows(acc, alpha))
    arrive(K_EMPTY + 1, plan.warpgroups_of_stage)
    return acc, Statistics(*after)


def _logits(tiles: Tiles, stage: int, of: WorkTile, tile: Array, plan: Plan) -> Array:
    """The logits of a tile, without the factor `plan.exponent`, −∞ where they are masked.

    The addresses of the products are computed again each time: kept in registers, they are spilled.
    """
    plgpu.barrier_wait(tiles.k_full.at[stage])
    begin, end = of.first_key - tile * BLOCK_K, of.stop - tile * BLOCK_K
    hides = (begin > 0) | (end < BLOCK_K)
    pl.when(hides)(lambda: zero_rows(tiles.k_latent.at[stage], begin, end))

    def product(s):
        (parts, _), again, zero = tiles.q, opaque_copy(stage), opaque_copy(0)
        for part, q in enumerate(parts):
            columns = pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)
            is_rope = part == plan.parts - 1
            k = tiles.k_rope.at[again] if is_rope else tiles.k_latent.at[again, :, columns]
            plgpu.wgmma(s, q.at[zero], k.T)
        return s[...]

    s = pl.run_scoped(product, accumulator(ROWS, BLOCK_K))
    if plan.softcap is not None:
        s = logits(s, plan.problem)
    position, left = of.position - tile * BLOCK_K, plan.window
    cut = hides | (position < BLOCK_K - 1)
    if left is not None:
        cut |= position + of.tokens - left > 0
    return lax.cond(cut, lambda s: jnp.where(_visible(position, end, plan), s, -jnp.inf), lambda s: s, s)


def _visible(position: Array, end: Array, plan: Plan) -> Array:
    """Which keys of a tile the rows see; `position` of their first token and `end` of the keys count from the tile."""
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    at = position + (lax.div(row, jnp.int32(plan.H)) if plan.tokens > 1 else 0 * row)
    ok = compare_columns("sle", jnp.minimum(at, end - 1), (ROWS, BLOCK_K))
    if plan.window is not None:
        ok &= compare_columns("sge", at - (plan.window - 1), (ROWS, BLOCK_K))
    return ok


def _publish(tiles: Tiles, stage: int, p: Array, maximum: Array) -> None:
    """Leaves the weights of a tile, and the row maxima with it, to the other warpgroup."""
    tiles.k_rope[stage] = p.astype(tiles.k_rope.dtype)
    tiles.maxima[stage] = maximum
    plgpu.commit_smem()


def _rescaled(tiles: Tiles, stage: int, acc: Array, before: Statistics) -> tuple[Array, Statistics]:
    """acc and the statistics under the row maxima that the other warpgroup has left with a tile."""
    maximum = load_vector(tiles.maxima.at[stage], PER_ROW)
    alpha = jnp.exp2(before.maximum - maximum)
    return times_rows(acc, alpha), Statistics(maximum, before.total * broadcast_rows(alpha, before.total))


def _plus_values(tiles: Tiles, stage: int, half: int, acc: Array) -> Array:
    """acc + p·v of a tile."""
    return pl.run_state(partial(_issue_values, tiles, stage, half))(plgpu.ACC.init(acc))


def _issue_values(tiles: Tiles, stage: int, half: int, acc: Any) -> None:
    """p·v of a tile. Its addresses are computed again each time: kept in registers, they are spilled."""
    stage = opaque_copy(stage)
    plgpu.wgmma(acc, tiles.k_rope.at[stage], tiles.k_latent.at[stage, :, pl.ds(half * HALF, HALF)])
