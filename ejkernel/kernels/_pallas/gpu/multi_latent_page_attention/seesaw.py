"""Tiles of 64 rows: two consumer warpgroups have 256 columns of o each, and one of every two tiles of logits.

The accumulator of o takes 128 registers of each thread. Warpgroup 0 computes the logits of even tiles, warpgroup 1
those of odd tiles (the seesaw schedule of FlashMLA). The warpgroup of tile t computes

    s = q·k_tᵀ,    m' = max(m, max_j s_j),    p = exp(s − m'),

and stores p and m' to shared memory, p over the rotary part of k_t, which is used in q·k_tᵀ alone. Both warpgroups
rescale acc by exp(m − m') and add p·v_t of their columns.
While warpgroup 0 computes the softmax of tile t, q·kᵀ of tile t + 1 is under way in warpgroup 1, and while that
computes its softmax, p·v of tile t is under way.

A stage is empty when both warpgroups have multiplied with it. A warpgroup that has waited for the full barrier of a
stage so knows that the other one has read p and m' of the previous tile there: these need no empty barrier of their
own.

Slots that no token sees may hold NaN: the warpgroup that computes the logits of a tile zeroes them first.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.registers import times_columns
from .._inline.rows import TILE_COLUMNS, store_rows
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
from ..flash_attention.problem import LOG2_E
from ..flash_attention.tiles import COLUMNS, LIMITS, LOWEST, Statistics, logits, weights
from ..ragged_page_attention.work import WorkTile
from . import lists, pages
from .factors import factors_of_rows, round_queries, scale_of_all
from .plan import BLOCK_K, HALF, K_EMPTY, P_FULL, STAGES, SUMS, Keys, Plan


class Shared(NamedTuple):
    """Shared memory of a thread block: q, k, the row maxima and sums, the full barriers, the scales of k, and what
    makes logits of rounded queries right.
    """

    q: Any
    k_latent: Any
    k_rope: Any
    maxima: Any
    sums: Any
    q_full: Any
    k_full: Any
    k_scales: Any = None
    q_factors: Any = None


def scratch(plan: Plan) -> dict[str, Any]:
    """The memory of `Shared`, but for q, k, their factors and the barriers."""
    del plan
    return dict(maxima=plgpu.SMEM((2, ROWS), jnp.float32), sums=plgpu.SMEM((2, ROWS), jnp.float32))


def consume(
    shared: Shared, keys: Keys, o, lse, work_tile: WorkTile, first: Array, pairs: Array, row: Array, part: Array,
    heads: Array, plan: Plan, number: int,
) -> None:  # fmt: skip
    """Consumer warpgroup `number`: the logits of every second tile of keys, and half of the columns of o."""
    plgpu.set_max_registers(plan.registers[0], action="increase")
    for stage in range(STAGES):
        arrive(K_EMPTY + stage, plan.warpgroups_of_stage)
    plgpu.barrier_wait(shared.q_full)
    if plan.rounds_queries:
        round_queries(shared, number, plan)
    factors = factors_of_rows(shared, keys, plan)
    step = partial((_even_first, _odd_second)[number], shared, keys, work_tile, first, factors, plan)
    start = Statistics(full((ROWS,), LOWEST, PER_ROW), full((ROWS, COLUMNS), 0.0, WGMMA))
    acc, last = lax.fori_loop(0, pairs, step, (full((ROWS, HALF), 0.0, WGMMA), start))
    total = last.total.sum(axis=1)
    shared.sums[number] = total
    plgpu.commit_smem()
    sync(SUMS, 2)
    total = total + load_vector(shared.sums.at[1 - number], PER_ROW)
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    of_rows = jnp.where(saw, (last.maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    scale = scale_of_all(keys, plan)
    out = part * (lse.shape[0] // plan.splits) + row
    store_rows(
        o,
        (acc * broadcast_rows((1 if scale is None else scale) / total, acc)).astype(o.dtype),
        out,
        plan.count(work_tile, heads),
        jnp.int32(number),
        lse,
        of_rows,
    )


def _even_first(
    shared: Shared, keys: Keys, work_tile: WorkTile, first: Array, factors: Array | None, plan: Plan, pair: Array,
    carry: tuple,
) -> tuple:  # fmt: skip
    """Warpgroup 0: the softmax of the even tile of a pair, then p·v of both."""
    acc, previous = carry
    s = _logits(shared, 0, keys, work_tile, first, factors, pair, plan)
    p, updated, alpha = weights(s, previous, None, plan.exponent, 0, LIMITS)
    _publish(shared, 0, p, updated.maximum)
    arrive(P_FULL, 2)
    acc = _plus_values(shared, 0, 0, times_rows(acc, alpha))
    arrive(K_EMPTY, plan.warpgroups_of_stage)
    sync(P_FULL + 1, 2)
    acc, updated = _rescaled(shared, 1, acc, updated)
    acc = _plus_values(shared, 1, 0, acc)
    arrive(K_EMPTY + 1, plan.warpgroups_of_stage)
    return acc, updated


def _odd_second(
    shared: Shared, keys: Keys, work_tile: WorkTile, first: Array, factors: Array | None, plan: Plan, pair: Array,
    carry: tuple,
) -> tuple:  # fmt: skip
    """Warpgroup 1: p·v of the even tile of a pair under the softmax of the odd one, then p·v of that."""
    acc, previous = carry
    s = _logits(shared, 1, keys, work_tile, first, factors, pair, plan)
    sync(P_FULL, 2)
    acc, previous = _rescaled(shared, 0, acc, previous)

    def both(refs):
        acc, maximum, total, factor = refs
        _issue_values(shared, 0, 1, acc)
        p, updated, alpha = weights(s, previous, None, plan.exponent, 0, LIMITS)
        _publish(shared, 1, p, updated.maximum)
        arrive(P_FULL + 1, 2)
        maximum[...], total[...], factor[...] = updated.maximum, updated.total, alpha
        plgpu.wgmma_wait(0)

    acc, *updated, alpha = pl.run_state(both)((plgpu.ACC.init(acc), *previous, previous.maximum))
    arrive(K_EMPTY, plan.warpgroups_of_stage)
    acc = _plus_values(shared, 1, 1, times_rows(acc, alpha))
    arrive(K_EMPTY + 1, plan.warpgroups_of_stage)
    return acc, Statistics(*updated)


def _logits(
    shared: Shared, stage: int, keys: Keys, work_tile: WorkTile, first: Array, factors: Array | None, pair: Array,
    plan: Plan,
) -> Array:  # fmt: skip
    """The logits of a tile of a pair, without the factor `plan.exponent`, −∞ where they are masked.

    The addresses of operands come from `opaque_copy`: kept in registers over the loop, they would be spilled.
    """
    tile = first + 2 * pair + stage
    source = lists if plan.lists else pages
    is_masked = source.await_tile(shared, keys, work_tile, tile, pair, stage, plan)

    def product(s):
        (parts, _), again, zero = shared.q, opaque_copy(stage), opaque_copy(0)
        for part, q in enumerate(parts):
            columns = pl.ds(part * TILE_COLUMNS, TILE_COLUMNS)
            is_rope = part == plan.parts - 1
            k = shared.k_rope.at[again] if is_rope else shared.k_latent.at[again, :, columns]
            plgpu.wgmma(s, q.at[zero], k.T)
        return s[...]

    s = _scaled(shared, stage, pl.run_scoped(product, accumulator(ROWS, BLOCK_K)))
    if factors is not None:
        s = s * broadcast_rows(factors, s)
    if plan.softcap is not None:
        s = logits(s, plan.problem)
    masked = partial(source.hide_columns, keys=keys, work_tile=work_tile, tile=tile, plan=plan)
    return lax.cond(is_masked, masked, lambda s: s, s)


def _scaled(shared: Shared, stage: int, tile: Array) -> Array:
    """A tile [rows, keys] times the scales of its keys, if they have some."""
    return tile if shared.k_scales is None else times_columns(tile, shared.k_scales.at[stage])


def _publish(shared: Shared, stage: int, p: Array, maximum: Array) -> None:
    """Stores the weights, times the scales of values, and the row maxima of a tile to shared memory, for the other
    warpgroup.
    """
    shared.k_rope[stage] = _scaled(shared, stage, p).astype(shared.k_rope.dtype)
    shared.maxima[stage] = maximum
    plgpu.commit_smem()


def _rescaled(shared: Shared, stage: int, acc: Array, previous: Statistics) -> tuple[Array, Statistics]:
    """acc and the statistics, rescaled to the row maxima that the other warpgroup has stored with a tile."""
    maximum = load_vector(shared.maxima.at[stage], PER_ROW)
    alpha = jnp.exp2(previous.maximum - maximum)
    return times_rows(acc, alpha), Statistics(maximum, previous.total * broadcast_rows(alpha, previous.total))


def _plus_values(shared: Shared, stage: int, half: int, acc: Array) -> Array:
    """acc + p·v of a tile."""
    return pl.run_state(partial(_issue_values, shared, stage, half))(plgpu.ACC.init(acc))


def _issue_values(shared: Shared, stage: int, half: int, acc: Any) -> None:
    """Issues p·v of a tile, with addresses that are not kept in registers over the loop (`opaque_copy`)."""
    stage = opaque_copy(stage)
    plgpu.wgmma(acc, shared.k_rope.at[stage], shared.k_latent.at[stage, :, pl.ds(half * HALF, HALF)])
