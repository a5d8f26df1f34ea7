"""The dK/dV consumer warpgroups of the backward: p and ds of a step, and the gradients that they accumulate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.products import Term, awaited, in_flight, product
from .._inline.registers import BITS, where_bits
from .._inline.rows import store_rows, store_tile
from .._launch import (
    PER_COLUMN,
    ROWS,
    WGMMA,
    arrive,
    broadcast_columns,
    either,
    full,
    load_vector,
    opaque_barrier,
    opaque_copy,
    stage_of,
    sync,
)
from .backward_plan import DONE, P_EMPTY, P_FULL, Q_EMPTY, STORED, WARPGROUPS, Plan, Shared
from .feature_tiles import Tiles
from .key_tile import KeyTile, key_tile, place_of
from .mask_info import MaskInfo
from .pairs import Pairs, transposed_bias
from .tiles import View, logits, visible, weights_of_lse

# Registers of a thread of each of the two.
REGISTERS = 216


def consume(
    tiles: Shared, mask_info: MaskInfo | None, pairs: Pairs | None, softmax_scale: Any, dk: Any, dv: Any, number: Array,
    plan: Plan,
) -> None:  # fmt: skip
    """A consumer warpgroup: accumulates dk and dv of its own 64 keys, or one of the two for keys that both share."""
    given = mask_info, pairs, softmax_scale, tiles
    role = lambda of, *arrays: lambda: _accumulate(of, arrays, *given, (dk, dv), number, plan)
    if plan.wide:
        either(number == 0, role(dv_consumer, 1), role(dk_consumer, 0))
    else:
        role(dk_dv_consumer, 0, 1)()


def _accumulate(
    of: Callable, arrays: tuple[int, ...], mask_info: MaskInfo | None, pairs: Pairs | None, softmax_scale: Any,
    tiles: Shared, out: tuple, number: Array, plan: Plan,
) -> None:  # fmt: skip
    """Computes the gradients of `arrays` (0: k, 1: v), and stores them through the shared memory of their tiles."""
    kv_tiles = tiles.k, tiles.v
    plgpu.set_max_registers(REGISTERS, action="increase")
    plgpu.barrier_wait(tiles.kv_full)
    zeros = (full((ROWS, kv_tiles[array].columns[-1].stop), 0.0, in_flight(jnp.float32)) for array in arrays)
    keys = key_tile(plan, mask_info, softmax_scale)
    found = awaited(0, *of(plan, keys, pairs, tiles, *zeros))
    sync(DONE, WARPGROUPS)
    place = place_of(plan)  # computed again, for a mainloop without a mask has no registers for it
    scale = plan.problem.scale if softmax_scale is None else softmax_scale[place[2], place[1]]
    if plan.splits > 1:
        for gradient, array in zip(found, arrays, strict=True):
            _store_rows(gradient * (scale, 1.0)[array], out[array], number, place, plan)
        return
    for gradient, array in zip(found, arrays, strict=True):
        key_block = 0 if plan.wide else number
        gradient = (gradient * (scale, 1.0)[array]).astype(plan.problem.dtype)
        for tile, of_part in zip(kv_tiles[array].parts, kv_tiles[array].columns, strict=True):
            store_tile(tile.at[key_block], gradient[:, of_part])
    plgpu.commit_smem()
    sync(STORED, 2)
    pl.when(number == 0)(lambda: _store(tiles.k, out[0], plan.problem.D, place, plan))
    pl.when(number == 1)(lambda: _store(tiles.v, out[1], plan.problem.V, place, plan))


def _store_rows(gradient: Array, out: Any, number: Array, place: tuple, plan: Plan) -> None:
    """Stores the float32 gradient of a warpgroup's keys among the rows [splits · b · K] of all splits."""
    first, kv_head, batch, split = place
    first += 0 if plan.wide else number * ROWS
    rows, features = out.shape[0] // (plan.splits * plan.problem.B), out.shape[2]
    begin = (split * plan.problem.B + batch) * rows
    store_rows(out, gradient[:, :features], begin + first, rows - first, kv_head)


def _store(tiles: Tiles, out: Any, features: int, place: tuple, plan: Plan) -> None:
    """Copies the gradient of all keys of the thread block to device memory."""
    first, kv_head, batch, _ = place
    for key_block in range(plan.key_blocks):
        rows = pl.ds(first + key_block * ROWS, ROWS)
        for tile, of_part in zip(tiles.copies, tiles.copied(features), strict=True):
            plgpu.copy_smem_to_gmem(tile.at[key_block], out.at[batch, rows, kv_head, of_part])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


# ---- The parts of a step


def _compute_p(
    plan: Plan, key_block: Array | int, keys: KeyTile, pairs: Pairs | None, tiles: Shared, step: Array, part: slice
) -> tuple[Array, Array]:
    """p = exp(s − lse) of 64 keys and a part of a step's queries, and p times the derivative of the softcap.

    With t = tanh(scale·q·k / softcap) the logit is s = softcap·t, and ds/d(scale·q·k) = 1 − t².
    """
    problem, mask_info = replace(plan.problem, scale=keys.scale), keys.mask_info
    stage = stage_of(step, plan.stages)
    uneven_keys = problem.K % plan.keys > 0 and (mask_info is None or plan.listed)
    words = _words(plan, key_block, keys, pairs, step, part)  # read while the products are computed

    def masked(exponents, tile, block):
        view = View(tile.batch, tile.first + key_block * ROWS, mask_info, of_keys=True)
        ok = visible(view, block * plan.block_q + part.start, exponents.shape, uneven_keys, problem)
        return jnp.where(ok, exponents, -jnp.inf)

    start = _of_queries(tiles.start.at[stage, part])
    first = start if problem.softcap is None else jnp.zeros(start.shape)
    if plan.bias:
        first += transposed_bias(tiles.bias.parts[0].at[stage, key_block, part], problem.scale)
    (products,) = awaited(0, product(first, _terms(tiles.k.parts, tiles.q.parts, key_block, stage, part)))
    t = logits(products, problem)
    exponents = t * problem.exponent + (0 if problem.softcap is None else start)
    if plan.mask:
        exponents = where_bits(words, exponents)
    elif uneven_keys or problem.cut:
        # Wide accumulators leave no registers for the scalars of the tile, so these are computed again.
        tile = key_tile(plan, mask_info) if plan.wide else keys
        block_range, (block, _) = tile.block_range(), tile.place(step)
        place = tile.step_of_tile(step) if plan.listed else block
        whole = (place >= block_range.full_begin) & (place < block_range.full_end)
        if uneven_keys:
            whole &= tile.first + plan.keys <= problem.K
        keep = lambda: exponents
        exponents = either(whole, keep, lambda: masked(exponents, tile, block), unused=keep)
    p = weights_of_lse(exponents)
    weights = (p,) if problem.softcap is None else (p, _sloped(p, t, plan))
    weights = lax.optimization_barrier(tuple(x.astype(problem.dtype) for x in weights))
    return weights[0], weights[-1]


def _sloped(p: Array, t: Array, plan: Plan) -> Array:
    """p times the derivative of the softcap; where p is 0 a bias, and so t, may be NaN."""
    sloped = p * (1 - t * t)
    return jnp.where(p == 0, p, sloped) if plan.bias else sloped


def _words(
    plan: Plan, key_block: Array | int, keys: KeyTile, pairs: Pairs | None, step: Array, part: slice
) -> Sequence[Array]:
    """Which of a part of a step's queries see 64 keys, as bits, where there is a mask."""
    if not plan.mask:
        return ()
    block, head = keys.place(step)
    words = block * (plan.block_q // BITS) + part.start // BITS
    row = keys.first + opaque_copy(key_block) * ROWS  # with fewer spills than an address that is kept
    return pairs.words(keys.batch, head, row, words, part.stop - part.start)


def _of_queries(vector: Any) -> Array:
    """A number for each of a part of a step's queries, for all keys."""
    square = jax.ShapeDtypeStruct((ROWS, vector.shape[0]), jnp.float32)
    return plgpu.layout_cast(broadcast_columns(load_vector(vector, PER_COLUMN), square), WGMMA)


def _terms(
    of_keys: Sequence[Any], of_queries: Sequence[Any], key_block: Array | int, stage: Array, part: slice
) -> list[Term]:
    """k·qᵀ or v·doᵀ of 64 keys and a part of a step's queries."""
    parts = zip(of_keys, of_queries, strict=True)
    return [Term(x.at[key_block], y.at[stage, part], transposed_b=True) for x, y in parts]


def _issue_dp(key_block: Array | int, tiles: Shared, stage: Array, part: slice) -> Array:
    """Begins dp − delta = v·doᵀ − delta, from the −delta that its tile holds."""
    terms = _terms(tiles.v.parts, tiles.do.parts, key_block, stage, part)
    return product(_of_queries(tiles.delta.at[stage, part]), terms)


def _issue_gradient(acc: Array, weights: Array, operand: Tiles, stage: Array, part: slice) -> Array:
    """Begins dv + p·do or dk + ds·q for a part of a step's queries."""
    parts = zip(operand.parts, operand.columns_of_sums, strict=True)
    return product(acc, [Term(weights, tile.at[stage, part], columns=columns) for tile, columns in parts])


def _store_ds(ds: Array, key_block: Array | int, tiles: Shared, step: Array, part: slice, plan: Plan) -> None:
    """Stores a part of ds in shared memory, for the warpgroup that accumulates dQ."""
    stage = stage_of(step, plan.ds_stages)
    if part == plan.parts[0]:
        pl.when(step >= plan.ds_stages)(lambda: plgpu.barrier_wait(tiles.ds_empty.at[stage]))
    store_tile(tiles.ds.at[stage, key_block, :, part], ds)
    if part == plan.parts[-1]:
        plgpu.commit_smem()
        arrive(plan.ds_full + stage, plan.key_blocks + 1)


# ---- The warpgroups: each returns the gradients of its keys after all steps, dk without the scale


def dk_dv_consumer(plan: Plan, keys: KeyTile, pairs: Pairs | None, tiles: Shared, dk: Array, dv: Array):
    """Accumulates dk and dv of this warpgroup's own 64 keys; for k and v of at most 320 columns together."""
    number = lax.axis_index("warpgroup")

    def compute(step, gradients):
        dk, dv = gradients
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(tiles.q_full.at[stage])
        for part in plan.parts:
            key_block = number if len(plan.parts) == 1 else opaque_copy(number)
            p, p_sloped = _compute_p(plan, key_block, keys, pairs, tiles, step, part)
            if part == plan.parts[0]:
                plgpu.barrier_wait(tiles.do_full.at[stage])

            opaque_barrier(p)
            dp = _issue_dp(key_block, tiles, stage, part)
            dv = _issue_gradient(dv, p, tiles.do, stage, part)
            (dp,) = awaited(1, dp)
            ds = (p_sloped.astype(jnp.float32) * dp).astype(plan.problem.dtype)
            dk = _issue_gradient(dk, ds, tiles.q, stage, part)
            _store_ds(ds, key_block, tiles, step, part, plan)
            plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)
        return dk, dv

    return lax.fori_loop(0, keys.steps(), compute, (dk, dv))


def dv_consumer(plan: Plan, keys: KeyTile, pairs: Pairs | None, tiles: Shared, dv: Array):
    """Accumulates dv of the 64 keys that both consumers share, and passes p to the other through shared memory."""
    (part,) = plan.parts

    def compute(step, dv):
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(tiles.q_full.at[stage])
        p, p_sloped = _compute_p(plan, 0, keys, pairs, tiles, step, part)
        plgpu.barrier_wait(tiles.do_full.at[stage])
        dv = _issue_gradient(dv, p, tiles.do, stage, part)
        pl.when(step > 0)(lambda: sync(P_EMPTY, 2))
        store_tile(tiles.p.at[0], p_sloped)
        arrive(P_FULL, 2)
        plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)
        return dv

    return (lax.fori_loop(0, keys.steps(), compute, dv),)


def dk_consumer(plan: Plan, keys: KeyTile, pairs: Pairs | None, tiles: Shared, dk: Array):
    """Accumulates dk of the 64 keys that both consumers share, with p from the other through shared memory."""
    (part,), last = plan.parts, keys.steps() - 1

    def compute(step, dk):
        stage = stage_of(step, plan.stages)
        plgpu.barrier_wait(tiles.do_full.at[stage])
        dp = _issue_dp(0, tiles, stage, part)
        sync(P_FULL, 2)
        p = tiles.p[0]
        pl.when(step < last)(lambda: arrive(P_EMPTY, 2))
        (dp,) = awaited(0, dp)
        ds = (p.astype(jnp.float32) * dp).astype(plan.problem.dtype)
        plgpu.barrier_wait(tiles.q_full.at[stage])
        dk = _issue_gradient(dk, ds, tiles.q, stage, part)
        _store_ds(ds, 0, tiles, step, part, plan)
        plgpu.wgmma_wait(0)
        arrive(Q_EMPTY + stage, WARPGROUPS)
        return dk

    return (lax.fori_loop(0, keys.steps(), compute, dk),)
