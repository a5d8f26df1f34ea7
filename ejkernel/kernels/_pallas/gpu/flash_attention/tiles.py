"""What is computed from a tile of q·kᵀ."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import PER_COLUMN, PER_ROW, WGMMA, across, in_warp, load_vector
from .mask_info import MaskInfo
from .problem import LOG2_E, Problem

# A thread has two numbers of every so many columns.
COLUMNS = 8


class Statistics(NamedTuple):
    """Of rows, over the keys seen so far: an exponent of two like the greatest, and sums of powers relative to it.

    maximum [rows], total [rows, COLUMNS]: where a thread has a number, the sum of what it has of a row.
    """

    maximum: Array
    total: Array


class Halves(NamedTuple):
    """Where weights may be computed in float16: under maxima that are whole numbers, and not beyond this …

    least: … and in blocks whose weights have at least this exponent of two; smaller ones it would lose.
    """

    maximum: float
    least: int


class Bounds(NamedTuple):
    """Of weights.

    lift: the exponent of two of the greatest weight under a new maximum. slack: by so much a maximum may be less than
    the greatest exponent. most: of the sums that a thread has of a row; more than those of weights of 2^lift. halves:
    of those in float16, where there are such.
    """

    lift: int
    slack: int
    most: float
    halves: Halves | None = None

    def maximum(self, greatest: Array) -> Array:
        """Of rows, to the greatest exponents."""
        return greatest if self.halves is None else jnp.round(greatest)


# Of float16, whose greatest number is 65504, and of bfloat16, which are no less exact when they are great.
HALF = Bounds(lift=0, slack=8, most=2.0**15)


def logits(products: Array, problem: Problem) -> Array:
    """The logits but for a factor, `problem.exponent`: q·kᵀ, or tanh(scale·q·kᵀ / softcap)."""
    if problem.softcap is None:
        return products
    e = jnp.exp2(products * (2 * LOG2_E * problem.scale / problem.softcap))
    return 1 - 2 / (e + 1)


class View(NamedTuple):
    """The batch index and the first row of a tile, rows being queries or keys, and what arrays say of whom it sees."""

    batch: Array
    row: Array
    mask_info: MaskInfo | None
    of_keys: bool = False


def seen(view: View, column: Array, shape: tuple[int, int], uneven_keys: bool, problem: Problem) -> Array | None:
    """Who sees whom in a tile that begins at a column, keys perhaps past the end if `uneven_keys`; None if all do.

    But for segments, a row sees the columns from the last of some firsts to the first of some lasts.
    """
    batch, row, mask_info, of_keys = view
    rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=PER_ROW) + row
    firsts, lasts, conditions = [], [], []
    if mask_info is not None and mask_info.intervals is not None:
        low, high = (_load(x, batch, row, shape[0], PER_ROW) for x in mask_info.intervals)
        firsts.append(low)
        lasts.append(high - 1)
    elif mask_info is not None:
        of_rows, of_columns = mask_info.segment_ids
        ids = lax.broadcast_in_dim(_load(of_columns, batch, column, shape[1], PER_COLUMN), shape, [1])
        conditions.append(across(_load(of_rows, batch, row, shape[0], PER_ROW), ids) == ids)
    elif uneven_keys and of_keys:
        lasts.append(jnp.where(rows < problem.K, column + shape[1], -1))
    elif uneven_keys:
        lasts.append(plgpu.layout_cast(jnp.full(shape[:1], problem.K - 1), PER_ROW))
    low, high = problem.band(of_keys)
    if high is not None:
        lasts.append(rows + high)
    if low is not None:
        firsts.append(rows + low)
    if firsts:
        conditions.append(_columns("sge", reduce(jnp.maximum, firsts) - column, shape))
    if lasts:
        conditions.append(_columns("sle", reduce(jnp.minimum, lasts) - column, shape))
    return reduce(operator.and_, conditions) if conditions else None


def _columns(comparison: str, bounds: Array, shape: tuple[int, int]) -> Array:
    """Where columns, numbered from 0, compare so with the bound of a row. A thread compares with constants."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    @plgpu.inline_mgpu(arg_types=(PER_ROW,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, WGMMA))
    def emit(_, bounds):
        i32, predicate = ir.IntegerType.get_signless(32), arith.CmpIPredicate[comparison]
        constant = lambda n: arith.constant(i32, n)
        text = "{ .reg .b32 x; mov.u32 x, %laneid; and.b32 x, x, 3; add.u32 $0, x, x; }"
        first = llvm.inline_asm(i32, [], text, "=r")
        bounds = bounds.broadcast_in_dim(shape, (0,), WGMMA.to_mgpu())
        of_rows = bounds.registers.reshape(shape[1] // COLUMNS, -1)[0]
        of_rows = [arith.subi(vector.extract(x, [], [0]), first) for x in of_rows]
        registers = np.empty((shape[1] // COLUMNS, len(of_rows)), object)
        for (n, row), _ in np.ndenumerate(registers):
            pair = [arith.cmpi(predicate, constant(n * COLUMNS + i), of_rows[row]) for i in range(2)]
            registers[n, row] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        return type(bounds)(
            _registers=registers.reshape(bounds.registers.shape), _layout=bounds.layout, _is_signed=False
        )

    return emit(bounds)


def _load(vectors, batch: Array, first: Array, length: int, layout) -> Array:
    """Of vectors [b, n] in device memory a part of one."""
    batch = batch if vectors.shape[0] > 1 else 0
    return load_vector(vectors.at[batch, pl.ds(first, length)], layout, optimized=False)


def weights(
    s: Array, before: Statistics, ok: Array | None, exponent: Array | float, lift: Array | int, bounds: Bounds
) -> tuple[Array, Statistics, Array]:
    """Of rows of queries 2^lift·exp(s − maximum) under the new maximum, the statistics, and the factor of earlier sums.

    s times `exponent` is an exponent of two. A maximum stays where none is greater by more than `slack`: then the
    factor is 1.
    """
    s = s.astype(jnp.float32)
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    greatest = bounds.maximum(s.max(axis=1) * exponent)
    maximum = jnp.where(greatest > before.maximum + bounds.slack, greatest, before.maximum)
    base = maximum if ok is None else jnp.where(maximum == -jnp.inf, 0.0, maximum)  # rows that have seen nothing yet
    p, total, fade = _relative_to(base, s, before, exponent, lift, bounds)
    return p, Statistics(maximum, total), fade


def updated(
    acc: Array, s: Array, before: Statistics, exponent: Array | float, lift: Array | int, bounds: Bounds,
    operand: Callable[[Array], Array],
) -> tuple[Array, Array, Statistics]:  # fmt: skip
    """acc, the weights of a block that is seen whole as an operand, and the statistics.

    A warp takes it that maxima stay, and looks at the sums of its threads: no weight is too great if none of these is.
    That saves the maxima. Otherwise it begins again.
    """
    p = _powers(s, exponent, before.maximum - lift)
    packed, sums = operand(p), of_threads(p)

    def stay(acc, s, p, sums):
        del s
        return acc, p, Statistics(before.maximum, before.total + _unlifted(sums, lift, bounds))

    def rise(acc, s, p, sums):
        s, fits = s.astype(jnp.float32), sums.max(axis=1) <= bounds.most
        if bounds.halves is not None:
            fits &= jnp.abs(before.maximum) <= bounds.halves.maximum
        risen = jnp.maximum(before.maximum, bounds.maximum(s.max(axis=1) * exponent))
        maximum = jnp.where(fits, before.maximum, risen)
        p, total, fade = _relative_to(maximum, s, before, exponent, lift, bounds)
        return acc * across(fade, acc), operand(p), Statistics(maximum, total)

    return lax.cond(_beyond(sums, before.maximum, lift, bounds), rise, stay, acc, s, packed, sums)


def _relative_to(
    base: Array, s: Array, before: Statistics, exponent: Array | float, lift: Array | int, bounds: Bounds
) -> tuple[Array, Array, Array]:
    """The weights, the sums with those of before, and the factor of these."""
    p, fade = _powers(s, exponent, base - lift), jnp.exp2(before.maximum - base)
    sums = of_threads(p)
    return p, before.total * across(fade, sums) + _unlifted(sums, lift, bounds), fade


def _powers(s: Array, exponent: Array | float, base: Array) -> Array:
    """2^(s·exponent − base), a base for each row.

    In float16 two numbers at once, of which the base has to be one, too.
    """
    if s.dtype == jnp.float32:
        return jnp.exp2(s * exponent - across(base, s))
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, plgpu.Layout.WG_SPLAT, PER_ROW), return_type=plgpu.ShapeDtypeStruct(s.shape, s.dtype, WGMMA)
    )
    def emit(_, s, exponent, base):
        i32 = ir.IntegerType.get_signless(32)
        word, pairs = ir.VectorType.get((1,), i32), ir.Type.parse("!llvm.struct<(i32, i32)>")
        text = "{ .reg .b16 x; cvt.rn.f16.f32 x, $1; mov.b32 $0, {x, x}; }"
        exponent = llvm.inline_asm(i32, [exponent.registers[()]], text, "=r,f")
        text = (
            "{ .reg .b32 b; .reg .b16 x, y; cvt.rn.f16x2.f32 b, $3, $2; neg.f16x2 b, b; "
            "mov.b32 {x, y}, b; mov.b32 $0, {x, x}; mov.b32 $1, {y, y}; }"
        )
        bases = llvm.inline_asm(pairs, [vector.extract(x, [], [0]) for x in base.registers.flat], text, "=r,=r,f,f")
        of_rows = [llvm.extractvalue(i32, bases, [i]) for i in range(2)]
        registers = np.empty((s.shape[1] // COLUMNS, len(of_rows)), object)
        for (n, row), x in np.ndenumerate(s.registers.reshape(registers.shape)):
            pair = vector.extract(vector.bitcast(word, x), [], [0])
            text = "{ .reg .b32 t; fma.rn.f16x2 t, $1, $2, $3; ex2.approx.f16x2 $0, t; }"
            pair = llvm.inline_asm(i32, [pair, exponent, of_rows[row]], text, "=r,r,r,r")
            registers[n, row] = vector.bitcast(x.type, vector.broadcast(word, pair))
        return type(s)(_registers=registers.reshape(s.registers.shape), _layout=s.layout, _is_signed=None)

    return emit(s, jnp.float32(exponent), base)


def _unlifted(sums: Array, lift: Array | int, bounds: Bounds) -> Array:
    """Sums of weights times 2^lift as such of weights times 2^(the bounds' lift)."""
    return sums if isinstance(lift, int) else sums * jnp.exp2(bounds.lift - lift)


def of_threads(x: Array) -> Array:
    """[rows, COLUMNS] float32: the sums of the numbers of a row that a thread has."""
    from jaxlib.mlir.dialects import arith

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, WGMMA))
    def emit(_, x):
        sums = [reduce(arith.addf, row) for row in x.registers.reshape(x.shape[1] // COLUMNS, -1).T]
        registers = np.array(sums, object).reshape(x.layout.registers_shape((x.shape[0], COLUMNS)))
        return type(x)(_registers=registers, _layout=x.layout, _is_signed=None)

    return emit(x).astype(jnp.float32)


def _beyond(sums: Array, maximum: Array, lift: Array | int, bounds: Bounds) -> Array:
    """Whether in this warp a sum is greater than it may be, or NaN, or weights are beyond float16."""
    most = bounds.most
    if bounds.halves is not None:
        most = jnp.where(lift < bounds.halves.least, -1.0, most)  # which every sum is beyond
    beyond = ~(sums <= most)
    if bounds.halves is not None:
        beyond |= across(jnp.abs(maximum) > bounds.halves.maximum, sums)
    return in_warp(beyond, WGMMA)
