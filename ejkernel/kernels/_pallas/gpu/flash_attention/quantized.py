"""The forward in e4m3: eight bits for q, k, v and the weights. A config asks for it.

Each tile of queries has a scale, and each block of keys, of k and of v. A kernel of its own rounds them (rounding.py).

The tensor cores take operands of eight bits only with the summed axis innermost, so v comes transposed. A thread has
the weights of keys 2c, 2c + 1, 8 + 2c and 9 + 2c of every 16 (c: its place among four) after q·kᵀ, and has to give
those of 4c to 4c + 3 to the next product. What is summed over may come in any order: v has its keys in the weights'.
"""

from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import WGMMA, across
from .problem import Problem
from .tiles import Statistics, logits

ALGORITHM = "e4m3"
E4M3 = jnp.float8_e4m3fn
GREATEST = float(jnp.finfo(E4M3).max)
# Weights are computed times 2⁶, so that the small ones are not lost, relative to a multiple of 4 that is nearest to the
# greatest exponent of two: 256 is in range, and 2⁻⁹ the smallest number.
LIFT = 6
# A number plus this is rounded to a multiple of 4.
FOURS = 1.5 * 2.0**25
# A thread has two numbers of every so many columns.
COLUMNS = 8
# As an exponent of two, the least that a block of v may be beside the greatest: weights of one of zeros still count.
LEAST = -60
# Keys that change places among themselves.
KEYS = 16


class Scales(NamedTuple):
    """queries [b, query heads, tiles], keys [b, heads, blocks]: the factors of a tile of q and of a block of k.

    values [b, heads]: the factor of what is summed over v. lifts [b, heads, blocks]: the exponents of two of weights.
    Where the numbers of a block of v are small beside those of others, its weights are as much smaller, so that all
    blocks may be added up.
    """

    queries: Array
    keys: Array
    lifts: Array
    values: Array


def scales_of(of_q: Array, of_k: Array, of_v: Array) -> Scales:
    """From the scales of tiles and blocks."""
    greatest = of_v.max(axis=2)
    return Scales(of_q, of_k, LIFT + jnp.maximum(jnp.log2(of_v / greatest[:, :, None]), LEAST), greatest)


def unit_of(greatest: Array) -> Array:
    """In units of this the greatest number is the greatest of e4m3."""
    return jnp.maximum(greatest * (1 / GREATEST), jnp.finfo(jnp.float32).tiny)


class Units(NamedTuple):
    """What the products of a tile are in: a factor of its queries, and those of the blocks of one head of k and v."""

    queries: Array
    scales: Scales
    head: tuple[Array, Array]

    def of(self, block: Array) -> tuple[Array, Array]:
        """The factor of q·kᵀ, and the exponent of two of the weights."""
        here = (*self.head, block)
        return self.queries * self.scales.keys[here], self.scales.lifts[here]


def weights(
    products: Array, unit: tuple[Array, Array], before: Statistics, ok: Array | None, problem: Problem
) -> tuple[Array, Statistics, Array]:
    """As `tiles.weights`, of products in a unit: weights times 2^lift; the statistics sum them times 2^LIFT.

    A maximum is a multiple of 4, and so seldom another than before.
    """
    factor, lift = unit
    s, exponent = products, problem.exponent * factor
    if problem.softcap is not None:
        s, exponent = logits(products * factor, problem), problem.exponent
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    greatest = _of_columns(s, "greatest").max(axis=1) * exponent
    maximum = jnp.maximum(before.maximum, (greatest + FOURS) - FOURS)
    base = maximum if ok is None else jnp.where(maximum == -jnp.inf, 0.0, maximum)  # rows that have seen nothing yet
    fade = jnp.exp2(before.maximum - base)
    p = jnp.exp2(s * exponent - across(base - lift, s))
    total = before.total * across(fade, before.total) + _of_columns(p, "sum") * jnp.exp2(LIFT - lift)
    return p, Statistics(maximum, total), fade


def _of_columns(x: Array, what: str) -> Array:
    """[rows, COLUMNS]: where a thread has a number of a row, the sum (or the greatest) of those that it has in x."""

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((x.shape[0], COLUMNS), x.dtype, WGMMA))
    def emit(_, x):
        by_row = x.registers.reshape(x.shape[1] // COLUMNS, -1).T
        registers = np.array({"sum": _sums, "greatest": _greatest}[what](by_row), object)
        shape = x.layout.registers_shape((x.shape[0], COLUMNS))
        return type(x)(_registers=registers.reshape(shape), _layout=x.layout, _is_signed=None)

    return emit(x)


def _sums(rows: np.ndarray) -> list:
    from jaxlib.mlir.dialects import arith

    return [reduce(arith.addf, row) for row in rows]


def _greatest(rows: np.ndarray) -> list:
    """Compared as integers, of which there is one instruction for three: right if one of them is not negative.

    The order of negative numbers is the other way round: so where a thread finds nothing else, its warp looks for the
    least integers as well.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, scf, vector

    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    rows = [[arith.bitcast(i32, vector.extract(x, [], [i])) for x in row for i in range(2)] for row in rows]

    def found(kind: str, row: list):
        lines = [f"{kind}.s32 x, $1, $2;", *(f"{kind}.s32 x, x, ${n};" for n in range(3, len(row) + 1))]
        text = "{ .reg .b32 x; " + " ".join(lines) + " mov.b32 $0, x; }"
        return llvm.inline_asm(i32, row, text, "=r" + ",r" * len(row))

    greatest = [found("max", row) for row in rows]
    text = (
        "{ .reg .pred p; .reg .b32 x; or.b32 x, $1, $2; setp.lt.s32 p, x, 0; "
        "vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
    )
    zero = arith.constant(i32, 0)
    some = llvm.inline_asm(i32, greatest, text, "=r,r,r", has_side_effects=True)
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, some, zero), [i32] * len(rows), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        negative = [arith.cmpi(arith.CmpIPredicate.slt, x, zero) for x in greatest]
        least = [found("min", row) for row in rows]
        scf.yield_([arith.select(*x) for x in zip(negative, least, greatest, strict=True)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(greatest)
    return [vector.broadcast(ir.VectorType.get((2,), f32), arith.bitcast(f32, x)) for x in branch.results]


def operand(p: Array) -> Array:
    """The weights in e4m3 as the first operand of a product, with its keys in the order in which they lie."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, E4M3, layout))
    def emit(_, p):
        i32, four = ir.IntegerType.get_signless(32), ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        to = layout.to_mgpu()
        registers = np.empty(to.registers_shape(p.shape), object)
        pairs = p.registers.reshape(p.shape[1] // 8, -1)
        for n, quad in enumerate(pairs.reshape(p.shape[1] // KEYS, 2, -1)):
            for row, (first, second) in enumerate(zip(*quad, strict=True)):
                numbers = [vector.extract(x, [], [i]) for x in (first, second) for i in range(2)]
                text = (
                    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; "
                    "cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
                )
                word = llvm.inline_asm(i32, numbers, text, "=r,f,f,f,f")
                single = vector.broadcast(ir.VectorType.get((1,), i32), word)
                registers.reshape(p.shape[1] // KEYS, -1)[n, row] = vector.bitcast(four, single)
        return type(p)(_registers=registers, _layout=to, _is_signed=None)

    return emit(p)
