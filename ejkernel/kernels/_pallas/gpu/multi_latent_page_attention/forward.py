"""Absorbed latent attention over pages: one tile of shared memory holds the keys of all heads and their values.

A thread block has 64 rows, heads of tokens, and one part of the keys that they see. The producer copies tiles of 64
slots, page by page, into two stages. Two consumer warpgroups have 256 columns of o each, 128 registers a thread. The
logits of even tiles are computed by warpgroup 0, those of odd tiles by warpgroup 1 (the seesaw of FlashMLA). For tile t
its owner computes

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

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
    load_vector,
    opaque_copy,
    shared,
    stage_of,
    sync,
    times_rows,
)  # fmt: skip
from ..flash_attention.plan import REGISTERS
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import COLUMNS, LIMITS, Statistics, logits, weights
from ..ragged_page_attention.work import WorkTile, most_tiles, work_tiles
from .merge import merged
from .plan import BLOCK_K, HALF, K_EMPTY, P_FULL, STAGES, SUMS, Plan

WARPGROUPS = 3
# The row maximum before any key: finite, so that masked logits of −∞ have weights of 0 under it.
LOWEST = float(np.finfo(np.float32).min) / 2


class Tiles(NamedTuple):
    """Shared memory of a thread block: q, k, the row maxima and sums, and the full barriers."""

    q: Any
    k_latent: Any
    k_rope: Any
    maxima: Any
    sums: Any
    q_full: Any
    k_full: Any


def multi_latent_page_attention(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Outputs:
    """o [b,t,h,c] and lse [b,t,h]."""
    plan, (B, T, H, R) = plan_of(x, spec, config), x.q_latent.shape
    window = None if spec.window is None else spec.window - 1
    table, total = work_tiles(
        x.context_lens, x.query_start_loc, x.num_seqs, T, plan.tokens, 1, window, plan.columns * plan.page
    )
    rows, dtype = B * T * H, x.q_latent.dtype
    of_parts = dtype if plan.splits == 1 else jnp.dtype(jnp.float32)
    o, lse = launch(
        partial(_kernel, plan=plan),
        "multi_latent_page_attention",
        (
            x.q_latent.reshape(rows, R),
            x.q_rope.reshape(rows, plan.D),
            x.pages.reshape(-1, R + plan.D),
            x.block_tables.reshape(B * plan.sequences, plan.columns),
            table,
            total,
        ),
        out_type=(
            jax.ShapeDtypeStruct((plan.splits * rows, 2, HALF), of_parts),
            jax.ShapeDtypeStruct((plan.splits * rows, 2), jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=WARPGROUPS,
        scratch=dict(
            q=plgpu.RefUnion(
                tuple(shared((1, ROWS, TILE_COLUMNS), dtype) for _ in range(plan.parts)),
                tuple(
                    plgpu.SMEM((1, ROWS, TILE_COLUMNS), dtype, transforms=(plgpu.SwizzleTransform(128),))
                    for _ in range(plan.parts)
                ),
            ),
            k_latent=shared((STAGES, BLOCK_K, R), dtype),
            k_rope=shared((STAGES, BLOCK_K, plan.D), dtype),
            maxima=plgpu.SMEM((2, ROWS), jnp.float32),
            sums=plgpu.SMEM((2, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=plan.parts),
            k_full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2 * plan.copies),
        ),
    )
    return merged(o, lse, x, plan)


def plan_of(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Plan:
    """The plan of a step (arrays or shapes)."""
    (B, T, H, R), (pools, pages, page, _), (_, N, J) = x.q_latent.shape, x.pages.shape, x.block_tables.shape
    tokens = max(1, min(config.queries_per_block, ROWS // H))
    return Plan(
        H, R, x.q_rope.shape[3], N, pages, page, pools, J, tokens, spec.num_splits or config.num_splits,
        min(most_tiles(B, N, T, tokens), B * T), spec.window, spec.softmax_scale, spec.softcap,
    )  # fmt: skip


def _kernel(q_latent, q_rope, pages, block_tables, table, total, o, lse, *, plan: Plan, **scratch):
    number, tiles = lax.axis_index("warpgroup"), Tiles(**scratch)
    index, part, heads = plan.place()

    def work():
        of = plan.work_tile(index, table)
        first, pairs = plan.tiles_of_keys(of, part)
        row = of.token * plan.H + heads * ROWS
        consume = partial(_consume, tiles, o, lse, of, first, pairs, row, part, heads, plan)
        produce = partial(_produce, tiles, q_latent, q_rope, pages, block_tables, of, first, pairs, row, plan)
        lax.cond(number < 2, lambda: lax.cond(number == 0, partial(consume, 0), partial(consume, 1)), produce)

    pl.when(index < total[0])(work)


def _produce(
    tiles: Tiles, q_latent, q_rope, pages, block_tables, of: WorkTile, first: Array, pairs: Array, row: Array,
    plan: Plan,
) -> None:  # fmt: skip
    """The producer warpgroup: q, and the tiles of keys into the stages as they become empty."""
    plgpu.set_max_registers(REGISTERS[2][1], action="decrease")
    _, parts = tiles.q
    for part, target in enumerate(parts):
        source, column = (q_latent, part * TILE_COLUMNS) if part < plan.parts - 1 else (q_rope, 0)
        plgpu.copy_gmem_to_smem(source.at[pl.ds(row, ROWS), pl.ds(column, TILE_COLUMNS)], target.at[0], tiles.q_full)

    def one(n, carry):
        stage = stage_of(n, STAGES)
        slots = plan.slots(of, first + n, block_tables)
        sync(K_EMPTY + stage, WARPGROUPS)
        for copy, slot in enumerate(slots):
            rows, to = pl.ds(slot, plan.rows_of_page), pl.ds(copy * plan.rows_of_page, plan.rows_of_page)
            full = tiles.k_full.at[stage]
            plgpu.copy_gmem_to_smem(pages.at[rows, pl.ds(0, plan.R)], tiles.k_latent.at[stage, to], full)
            plgpu.copy_gmem_to_smem(pages.at[rows, pl.ds(plan.R, plan.D)], tiles.k_rope.at[stage, to], full)
        return carry

    lax.fori_loop(0, 2 * pairs, one, jnp.int32(0))


def _consume(
    tiles: Tiles, o, lse, of: WorkTile, first: Array, pairs: Array, row: Array, part: Array, heads: Array,
    plan: Plan, number: int,
) -> None:  # fmt: skip
    """Consumer warpgroup `number`: the logits of every second tile of keys, and half of the columns of o."""
    plgpu.set_max_registers(REGISTERS[2][0], action="increase")
    for stage in range(STAGES):
        arrive(K_EMPTY + stage, WARPGROUPS)
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
    count = jnp.minimum(of.tokens * plan.H, plan.H - heads * ROWS) if plan.head_blocks > 1 else of.tokens * plan.H
    out = part * (lse.shape[0] // plan.splits) + row
    store_rows(o, lse, (acc * broadcast_rows(1 / total, acc)).astype(o.dtype), of_rows, out, count, jnp.int32(number))


def _even_first(tiles: Tiles, of: WorkTile, first: Array, plan: Plan, pair: Array, carry: tuple) -> tuple:
    """Warpgroup 0: the softmax of the even tile of a pair, then p·v of both."""
    acc, before = carry
    s = _logits(tiles, 0, of, first + 2 * pair, plan)
    p, after, alpha = weights(s, before, None, plan.exponent, 0, LIMITS)
    _publish(tiles, 0, p, after.maximum)
    arrive(P_FULL, 2)
    acc = _plus_values(tiles, 0, 0, times_rows(acc, alpha))
    arrive(K_EMPTY, WARPGROUPS)
    sync(P_FULL + 1, 2)
    acc, after = _rescaled(tiles, 1, acc, after)
    acc = _plus_values(tiles, 1, 0, acc)
    arrive(K_EMPTY + 1, WARPGROUPS)
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
    arrive(K_EMPTY, WARPGROUPS)
    acc = _plus_values(tiles, 1, 1, times_rows(acc, alpha))
    arrive(K_EMPTY + 1, WARPGROUPS)
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
