"""Logits, masks, weights and row statistics of a tile of q·kᵀ."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.barriers import warp_any
from .._inline.registers import COLUMNS as COLUMNS  # which is asked for here
from .._inline.registers import (
    compare_columns,
    powers_of_pairs,
    powers_of_polynomial,
    reciprocal,
    thread_partial_row_sums,
)
from .._launch import PER_COLUMN, PER_ROW, WGMMA, broadcast_rows, load_vector
from .mask_info import MaskInfo
from .problem import LOG2_E, Problem

# The row maximum before any key where masked logits are −∞: finite, so that their weights under it are 0.
LOWEST = float(np.finfo(np.float32).min) / 2
# In the place of q·kᵀ for a hidden key where a softcap follows: −∞, which a bias may give, is then the logit −softcap.
HIDDEN = float(np.finfo(np.float32).min)


class Statistics(NamedTuple):
    """Row statistics of the blocks of keys so far: m, near the greatest log₂ weight, and the sums of weights / 2^m.

    maximum [rows], total [rows, COLUMNS]: partial sums, one for each thread of a row.
    """

    maximum: Array
    total: Array


class Float16Limits(NamedTuple):
    """The range in which weights may be computed in float16.

    maximum: row maxima are whole numbers, and at most this. least: blocks have a p_scale_log2 of at least this; smaller
    weights would be lost.
    """

    maximum: float
    least: int


class RescaleLimits(NamedTuple):
    """How far a row maximum may lag behind the greatest logit before acc is rescaled (lazy rescaling).

    p_scale_log2: weights are computed times two to this. rescale_threshold: in log₂, by how much the greatest may
    exceed the maximum. row_sum_limit: of the sums that a thread has of a row, above which a maximum is looked for.
    float16: the limits of weights that are computed in float16, where some are.
    """

    p_scale_log2: int
    rescale_threshold: int
    row_sum_limit: float
    float16: Float16Limits | None = None

    def maximum(self, greatest: Array) -> Array:
        """The row maxima for the greatest log₂ weights."""
        return greatest if self.float16 is None else jnp.round(greatest)


# For float16, whose greatest number is 65504; bfloat16 is as exact for large weights.
LIMITS = RescaleLimits(p_scale_log2=0, rescale_threshold=8, row_sum_limit=2.0**15)
# tanh(x) / x as a polynomial in x², the least powers first: up to |x| = 0.45 its relative error is 1.3e-5.
TANH, MOST_OF_TANH = (0.99998766, -0.33222705, 0.11835345), 0.45
# The greatest logit of the polynomial, of whose weight that error is 4e-4, a fifth of the rounding of bfloat16.
MOST_OF_LOGIT = 32.0


def logits(products: Array, problem: Problem) -> Array:
    """The logits without the factor `problem.exponent`: q·kᵀ, or tanh(scale·q·kᵀ / softcap)."""
    if problem.softcap is None:
        return products
    e = jnp.exp2(products * (2 * LOG2_E * problem.scale / problem.softcap))
    return 1 - 2 * reciprocal(e + 1)


def powers_of_softcap(products: Array, base: Array, problem: Problem) -> tuple[Array, Array]:
    """2^(logits·exponent − base), with tanh by a polynomial, and whether any product is out of the range of that.

    That is a few multiply-adds, where `logits` needs the unit of exponentials twice, which p then waits for. The second
    is [rows, COLUMNS], of the numbers of a row that a thread holds.
    """
    ratio = problem.scale / problem.softcap
    coefficients = [c * problem.exponent * ratio ** (2 * n + 1) for n, c in enumerate(TANH)]
    p, squares = powers_of_polynomial(products, coefficients, base)
    most = min(MOST_OF_TANH, MOST_OF_LOGIT / problem.softcap) / ratio
    return p, ~(squares <= most**2)


def weights_of_lse(exponents: Array) -> Array:
    """2^exponents of exponents that are log₂ of softmax weights, s − lse, and so at most 0 but for rounding.

    Of logits near 10⁹ float32 keeps every 64th number: products that are summed in another order than the forward's
    are above lse by more than 128. 2^(−|x|) is as near to the weight, and finite; ex2 takes −|x| as its operand.
    """
    return jnp.exp2(-jnp.abs(exponents))


class View(NamedTuple):
    """The batch index and the first row of a tile (queries or keys), the mask of arrays, and the column after the last
    that any row sees, if not all.
    """

    batch: Array
    row: Array
    mask_info: MaskInfo | None
    of_keys: bool = False
    stop: Array | None = None


def loaded(view: View, column: Array, shape: tuple[int, int]) -> tuple[Array, Array] | None:
    """What the mask of a tile that begins at `column` needs from device memory, if anything.

    The first and the stop of the interval of columns that each row sees, or the segment ids of rows and of columns.
    """
    batch, row, mask_info, *_ = view
    if mask_info is not None and mask_info.intervals is not None:
        return tuple(_load(x, batch, row, shape[0], PER_ROW) for x in mask_info.intervals)
    if mask_info is not None and mask_info.segment_ids is not None:
        of_rows, of_columns = mask_info.segment_ids
        of_columns = _load(of_columns, batch, column, shape[1], PER_COLUMN)
        return _load(of_rows, batch, row, shape[0], PER_ROW), of_columns
    return None


def visible(
    view: View, column: Array, shape: tuple[int, int], uneven_keys: bool, problem: Problem,
    given: tuple[Array, Array] | None = None,
) -> Array | None:  # fmt: skip
    """The mask of a tile that begins at `column`, or None if all is visible; `uneven_keys`: keys may be past the end.

    Without segments a row sees one interval of columns, the intersection of the intervals of all conditions. What is
    `loaded` may be given, if it was loaded before.
    """
    _, row, mask_info, of_keys, stop = view
    rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=PER_ROW) + row
    firsts, lasts, conditions = [], [], []
    given = loaded(view, column, shape) if given is None else given
    if mask_info is not None and mask_info.intervals is not None:
        low, high = given
        firsts.append(low)
        lasts.append(high - 1)
    elif mask_info is not None and mask_info.segment_ids is not None:
        of_rows, of_columns = given
        ids = lax.broadcast_in_dim(of_columns, shape, [1])
        conditions.append(broadcast_rows(of_rows, ids) == ids)
    elif uneven_keys and of_keys:
        lasts.append(jnp.where(rows < problem.K, column + shape[1], -1))
    elif uneven_keys:
        lasts.append(plgpu.layout_cast(jnp.full(shape[:1], problem.K - 1), PER_ROW))
    low, high = problem.band(of_keys)
    if stop is not None:
        lasts.append(jnp.broadcast_to(stop - 1, shape[:1]))
    if high is not None:
        lasts.append(rows + high)
    if low is not None:
        firsts.append(rows + low)
    if firsts:
        conditions.append(compare_columns("sge", reduce(jnp.maximum, firsts) - column, shape))
    if lasts:
        conditions.append(compare_columns("sle", reduce(jnp.minimum, lasts) - column, shape))
    return reduce(operator.and_, conditions) if conditions else None


def _load(vectors, batch: Array, first: Array, length: int, layout) -> Array:
    """`length` numbers from `first` on of one row of `vectors` [b, n] in device memory; b may be 1."""
    batch = batch if vectors.shape[0] > 1 else 0
    return load_vector(vectors.at[batch, pl.ds(first, length)], layout, optimized=False)


def weights(
    s: Array,
    previous: Statistics,
    ok: Array | None,
    exponent: Array | float,
    p_scale_log2: Array | int,
    limits: RescaleLimits,
    has_mask: bool = False,
) -> tuple[Array, Statistics, Array]:
    """p = 2^p_scale_log2·exp(s − m) under the new row maximum m, the statistics, and alpha, the factor of earlier sums.

    s times `exponent` is the log₂ of a weight. A maximum stays where none is greater by more than `rescale_threshold`:
    then alpha is 1. `has_mask`: logits may be −∞ where `ok` does not say so.
    """
    s = s.astype(jnp.float32)
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    greatest = limits.maximum(s.max(axis=1) * exponent)
    maximum = lax.select(greatest > previous.maximum + limits.rescale_threshold, greatest, previous.maximum)
    base = _base(maximum, has_mask or ok is not None)
    p, total, alpha = _relative_to(base, s, previous, exponent, p_scale_log2, limits)
    return p, Statistics(maximum, total), alpha


def updated(
    acc: Array, s: Array, previous: Statistics, exponent: Array | float, p_scale_log2: Array | int,
    limits: RescaleLimits, operand: Callable[[Array], Array], has_mask: bool = False, capped: Problem | None = None,
) -> tuple[Array, Array, Statistics]:  # fmt: skip
    """acc, p of a block as an operand of wgmma, and the statistics, without a reduction of the maximum if none changes.

    A warp computes p with its previous row maxima, and checks the partial row sums of its threads: if none exceeds the
    limit, no weight does. Otherwise `rescale` computes p again with new maxima, and rescales acc.
    `has_mask`: a row may be all −∞; its NaN sums then fail the check, and `rescale` recomputes it.
    `capped`: s is q·kᵀ, and the logits with its softcap are those of a polynomial, as long as all are in its range. It
    has HIDDEN in the place of −∞.
    """
    out_of_range = None
    if capped is None:
        p = _powers(s, exponent, previous.maximum - p_scale_log2)
    else:
        p, out_of_range = powers_of_softcap(s, previous.maximum - p_scale_log2, capped)
    packed, sums = operand(p), thread_partial_row_sums(p)

    def keep_maximum(acc, s, p, sums):
        del s
        return acc, p, Statistics(previous.maximum, previous.total + _unscaled(sums, p_scale_log2, limits))

    def rescale(acc, s, p, sums):
        s, fits = s.astype(jnp.float32), sums.max(axis=1) <= limits.row_sum_limit
        if capped is not None:
            s = jnp.where(s == HIDDEN, -jnp.inf, logits(s, capped)) if has_mask else logits(s, capped)
        if limits.float16 is not None:
            fits &= jnp.abs(previous.maximum) <= limits.float16.maximum
        raised = jnp.maximum(previous.maximum, limits.maximum(s.max(axis=1) * exponent))
        if capped is not None:  # the sums are wrong where the polynomial is
            fits = raised <= previous.maximum + limits.rescale_threshold
        maximum = lax.select(fits, previous.maximum, raised)
        p, total, alpha = _relative_to(_base(maximum, has_mask), s, previous, exponent, p_scale_log2, limits)
        return acc * broadcast_rows(alpha, acc), operand(p), Statistics(maximum, total)

    beyond = _beyond(sums, previous.maximum, p_scale_log2, limits, out_of_range)
    return lax.cond(beyond, rescale, keep_maximum, acc, s, packed, sums)


def _base(maximum: Array, has_mask: bool) -> Array:
    """What weights are relative to: the maxima, or 0 in rows that have seen no key yet."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum) if has_mask else maximum


def _relative_to(
    base: Array, s: Array, previous: Statistics, exponent: Array | float, p_scale_log2: Array | int,
    limits: RescaleLimits,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """p relative to the maximum `base`, the updated row sums, and alpha, by which earlier sums are rescaled."""
    p, alpha = _powers(s, exponent, base - p_scale_log2), jnp.exp2(previous.maximum - base)
    sums = thread_partial_row_sums(p)
    return p, previous.total * broadcast_rows(alpha, sums) + _unscaled(sums, p_scale_log2, limits), alpha


def _powers(s: Array, exponent: Array | float, base: Array) -> Array:
    """2^(s·exponent − base), with one base per row.

    In float16 two numbers are computed per instruction, and the base has to be a float16 number, too.
    """
    if s.dtype == jnp.float32:
        return jnp.exp2(s * exponent - broadcast_rows(base, s))
    return powers_of_pairs(s, jnp.float32(exponent), base)


def _unscaled(sums: Array, p_scale_log2: Array | int, limits: RescaleLimits) -> Array:
    """Converts sums of weights with their own p_scale_log2 to that of the limits."""
    return sums if isinstance(p_scale_log2, int) else sums * jnp.exp2(limits.p_scale_log2 - p_scale_log2)


def _beyond(
    sums: Array, maximum: Array, p_scale_log2: Array | int, limits: RescaleLimits, out_of_range: Array | None
) -> Array:
    """Whether any row sum of this warp exceeds the limit or is NaN, or any weight is out of the range of float16.

    Or `out_of_range`, if given, is true in any of its threads.
    """
    row_sum_limit = limits.row_sum_limit
    if limits.float16 is not None:
        row_sum_limit = jnp.where(p_scale_log2 < limits.float16.least, -1.0, row_sum_limit)  # which every sum is beyond
    beyond = ~(sums <= row_sum_limit)
    if out_of_range is not None:
        beyond |= out_of_range
    if limits.float16 is not None:
        beyond |= broadcast_rows(jnp.abs(maximum) > limits.float16.maximum, sums)
    return warp_any(beyond, WGMMA)
