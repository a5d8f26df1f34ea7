"""The forward in e4m3: eight bits for q, k, v and the weights, where `precision` allows it.

Each tile of queries has a scale, and each block of keys, of k and of v. A kernel of its own rounds them (rounding.py).
q·kᵀ is summed in float16, for which q and k are small enough; its error is a small part of that of their rounding. So
logits take half of the registers, and the softmax computes two of them at once (`tiles.updated`). Maxima are whole
numbers, of which float16 has all that matter.

The tensor cores take operands of eight bits only with the summed axis innermost, so v comes transposed. A thread has
the weights of keys 2c, 2c + 1, 8 + 2c and 9 + 2c of every 16 (c: its place among four) after q·kᵀ, and has to give
those of 4c to 4c + 3 to the next product. What is summed over may come in any order: v has its keys in the weights'.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import WGMMA
from .tiles import Float16Limits, RescaleLimits

E4M3 = jnp.float8_e4m3fn
GREATEST = float(jnp.finfo(E4M3).max)
# As an exponent of two, the least that a block of v may be beside the greatest: weights of one of zeros still count.
LEAST = -60
# Weights are computed times 2⁴, so that the small ones are not lost: 448 is in range, and 2⁻⁹ the smallest number.
# Float16 has the whole numbers up to 2048, and 2⁻²⁴: a weight of 2⁻²⁰ in blocks where the greatest are 2⁻⁴.
LIMITS = RescaleLimits(
    p_scale_log2=4, rescale_threshold=4, row_sum_limit=GREATEST, float16=Float16Limits(maximum=2044.0, least=-4)
)
# Keys that change places among themselves.
KEYS = 16


class Scales(NamedTuple):
    """queries [b, query heads, tiles], keys [b, heads, blocks]: the factors of a tile of q and of a block of k.

    values [b, heads]: the factor of what is summed over v. p_scales_log2 [b, heads, blocks]: log₂ of what p is scaled
    by. Where the numbers of a block of v are small beside those of others, its weights are as much smaller, so that all
    blocks may be added up.
    """

    queries: Array
    keys: Array
    p_scales_log2: Array
    values: Array


def greatest_of(features: int) -> tuple[float, float, float]:
    """Of q, k and v in e4m3, so that no product of a query and a key is beyond float16."""
    q, half = 16.0, float(jnp.finfo(jnp.float16).max)
    step = 2.0 ** (math.floor(math.log2(half / (q * features))) - jnp.finfo(E4M3).nmant)
    return q, half / (q * features) // step * step, GREATEST


def scales_of(of_q: Array, of_k: Array, of_v: Array) -> Scales:
    """From the scales of tiles and blocks."""
    greatest = of_v.max(axis=2)
    scales_log2 = jnp.round(jnp.log2(of_v / greatest[:, :, None]))
    return Scales(of_q, of_k, LIMITS.p_scale_log2 + jnp.maximum(scales_log2, LEAST), greatest)


def unit_of(greatest: Array, most: float) -> Array:
    """The power of two in units of which the greatest number is `most` at most, and more than a quarter of it."""
    unit = jnp.maximum(greatest * (1 / most), jnp.finfo(jnp.float32).tiny)
    return jnp.exp2(jnp.round(jnp.log2(unit) + 0.5))


class Unit(NamedTuple):
    """The factor of q·kᵀ of a block of keys, and log₂ of what its weights are scaled by."""

    factor: Array | float
    p_scale_log2: Array | int


class Units(NamedTuple):
    """What the products of a tile are in: a factor of its queries, and those of the blocks of one head of k and v."""

    queries: Array
    scales: Scales
    head: tuple[Array, Array]

    def of(self, block: Array) -> Unit:
        here = (*self.head, block)
        return Unit(self.queries * self.scales.keys[here], self.scales.p_scales_log2[here])


def operand(p: Array) -> Array:
    """The weights, float32 or float16, in e4m3 as the first operand of a product, with its keys in their order."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    layout = plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(p.shape, E4M3, layout))
    def emit(_, p):
        i32, four = ir.IntegerType.get_signless(32), ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        to = layout.to_mgpu()
        registers = np.empty(to.registers_shape(p.shape), object)
        single = ir.VectorType.get((1,), i32)
        if isinstance(p.mlir_dtype, ir.F16Type):
            numbers = lambda pair: [vector.extract(vector.bitcast(single, pair), [], [0])]
            source, low, high, constraints = "f16x2", "$1", "$2", "=r,r,r"
        else:
            numbers = lambda pair: [vector.extract(pair, [], [i]) for i in range(2)]
            source, low, high, constraints = "f32", "$2, $1", "$4, $3", "=r,f,f,f,f"
        round_pair = f"cvt.rn.satfinite.e4m3x2.{source}"
        text = f"{{ .reg .b16 lo, hi; {round_pair} lo, {low}; {round_pair} hi, {high}; mov.b32 $0, {{lo, hi}}; }}"
        for n, quad in enumerate(p.registers.reshape(p.shape[1] // KEYS, 2, -1)):
            for row, (first, second) in enumerate(zip(*quad, strict=True)):
                word = llvm.inline_asm(i32, numbers(first) + numbers(second), text, constraints)
                registers.reshape(p.shape[1] // KEYS, -1)[n, row] = vector.bitcast(four, vector.broadcast(single, word))
        return type(p)(_registers=registers, _layout=to, _is_signed=None)

    return emit(p)
