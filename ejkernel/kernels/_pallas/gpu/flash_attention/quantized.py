"""The forward in e4m3: eight bits for q, k, v and the weights. A config asks for it.

Each tile of queries has a scale, and each block of keys, of k and of v. A kernel of its own rounds them (rounding.py).

The tensor cores take operands of eight bits only with the summed axis innermost, so v comes transposed. A thread has
the weights of keys 2c, 2c + 1, 8 + 2c and 9 + 2c of every 16 (c: its place among four) after q·kᵀ, and has to give
those of 4c to 4c + 3 to the next product. What is summed over may come in any order: v has its keys in the weights'.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import WGMMA
from .tiles import Bounds

ALGORITHM = "e4m3"
E4M3 = jnp.float8_e4m3fn
GREATEST = float(jnp.finfo(E4M3).max)
# Weights are computed times 2⁴, so that the small ones are not lost: 448 is in range, and 2⁻⁹ the smallest number.
BOUNDS = Bounds(lift=4, slack=4, most=GREATEST)
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
    return Scales(of_q, of_k, BOUNDS.lift + jnp.maximum(jnp.log2(of_v / greatest[:, :, None]), LEAST), greatest)


def unit_of(greatest: Array) -> Array:
    """In units of this the greatest number is the greatest of e4m3."""
    return jnp.maximum(greatest * (1 / GREATEST), jnp.finfo(jnp.float32).tiny)


class Unit(NamedTuple):
    """The factor of q·kᵀ of a block of keys, and the exponent of two of its weights."""

    factor: Array | float
    lift: Array | int


class Units(NamedTuple):
    """What the products of a tile are in: a factor of its queries, and those of the blocks of one head of k and v."""

    queries: Array
    scales: Scales
    head: tuple[Array, Array]

    def of(self, block: Array) -> Unit:
        here = (*self.head, block)
        return Unit(self.queries * self.scales.keys[here], self.scales.lifts[here])


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
