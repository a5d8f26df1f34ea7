"""The softmax of a block of keys in the mainloop of the forward: what it loads, its logits, its mask, its weights."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.registers import BITS, times_columns, where_bits
from .._launch import ROWS, stage_of
from .consumer_tile import ConsumerTile, Shared
from .pairs import biased
from .plan import Plan
from .problem import Problem
from .quantized import Unit
from .tiles import HIDDEN, Statistics, loaded, logits, visible, weights


class BlockInputs(NamedTuple):
    """What a softmax of a block of keys loads from device memory: the scales in e4m3, the words of mask bits, and the
    intervals or segment ids of a block that arrays mask.
    """

    unit: Unit
    bits: Sequence[Array]
    mask: tuple[Array, Array] | None = None


def block_of(tile: ConsumerTile, i: Array | int) -> Array:
    """The i-th block of a work tile from the end, in blocks of keys."""
    return tile.block(tile.block_range.end - 1 - i)


def block_inputs(tile: ConsumerTile, i: Array | int, plan: Plan, masked: bool) -> BlockInputs:
    """What the softmax of a block loads; the numbers of a mask if it is `masked`."""
    unit = Unit(1.0, 0) if tile.units is None else tile.units.of(block_of(tile, i))
    mask = None
    if masked and plan.problem.masked_by_arrays:
        mask = loaded(tile.view, block_of(tile, i) * plan.block_k, (ROWS, plan.block_k))
    if tile.pairs is None:
        return BlockInputs(unit, (), mask)
    first = block_of(tile, i) * (plan.block_k // BITS)
    bits = tile.pairs.words(tile.view.batch, tile.head, tile.view.row, first, plan.block_k)
    return BlockInputs(unit, bits, mask)


def with_bias(products: Array, shared: Shared, tile: ConsumerTile, step: Array | int, plan: Plan) -> Array:
    """q·kᵀ with the scales that are operands, and the bias of the block that was loaded in this step."""
    if shared.k_scales is not None:
        products = times_columns(products, shared.k_scales.at[stage_of(step, shared.k_scales.shape[0])])
    if tile.softmax_scale is not None:
        products = products * tile.softmax_scale  # which may be negative: row maxima are those of the logits
    if not plan.bias:
        return products
    stage = stage_of(step, plan.stages)
    plgpu.barrier_wait(shared.bias_full.at[stage])
    bias_tile = shared.bias.parts[0].at[stage, pl.ds(tile.number * ROWS, ROWS)]
    return biased(products, bias_tile, plan.problem.scale)


def _logits(products: Array, unit: Unit, problem: Problem) -> Array:
    """q·kᵀ, or with a softcap the tanh of the logits."""
    return products if problem.softcap is None else logits(products.astype(jnp.float32) * unit.factor, problem)


def exponent_of(unit: Unit, problem: Problem) -> Array | float:
    """The factor that makes `_logits` log₂ of weights."""
    return problem.exponent * unit.factor if problem.softcap is None else problem.exponent


def _visible(
    tile: ConsumerTile, i: Array | int, shape: tuple[int, int], plan: Plan, given: tuple[Array, Array] | None = None
) -> Array | None:
    """The mask of a block, or None if all of it is visible. What it loads may be `given`."""
    # An empty list names a block past the last one, which is fully masked.
    uneven = plan.listed or plan.problem.K % plan.block_k > 0
    return visible(tile.view, block_of(tile, i) * plan.block_k, shape, uneven, plan.problem, given)


def hidden_logits(
    products: Array, tile: ConsumerTile, i: Array, inputs: BlockInputs, masked: Array | bool, plan: Plan
) -> Array:
    """The logits of a block, with −∞ for the keys that a row does not see.

    Where a softcap's tanh is a polynomial, which is computed with the weights: q·kᵀ, with HIDDEN for these keys.
    `masked`: whether there are such keys; False, or a condition.
    """
    s = products if plan.tanh_by_polynomial else _logits(products, inputs.unit, plan.problem)
    if plan.mask:
        s = where_bits(inputs.bits, s)
    if masked is False:
        return s

    def hide(s):
        ok = _visible(tile, i, s.shape, plan)
        return s if ok is None else jnp.where(ok, s, HIDDEN if plan.tanh_by_polynomial else -jnp.inf)

    return lax.cond(masked, hide, lambda s: s, s)


def block_weights(qk: Array, tile: ConsumerTile, previous: Statistics, i: Array | int, inputs: BlockInputs, plan: Plan):
    """p of a block that may be masked, as an operand of wgmma; the row statistics; and alpha, which rescales acc."""
    unit = inputs.unit
    ok = _visible(tile, i, qk.shape, plan, inputs.mask)
    s = _logits(qk, unit, plan.problem)
    if plan.mask:
        s = where_bits(inputs.bits, s)
    exponent, has_mask = exponent_of(unit, plan.problem), plan.bias or plan.mask
    p, statistics, alpha = weights(s, previous, ok, exponent, unit.p_scale_log2, plan.limits, has_mask)
    return plan.operand(p), statistics, alpha
