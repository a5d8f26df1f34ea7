"""The forward in e4m3: eight bits for q, k, v and the weights, with a scale for each head. A config asks for it.

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

ALGORITHM = "e4m3"
E4M3 = jnp.float8_e4m3fn
GREATEST = float(jnp.finfo(E4M3).max)
# Weights are computed times 2⁸, so that the small ones are not lost: 256 is in range, and 2⁻⁹ the smallest number.
LIFT = 8
# Keys that change places among themselves; and what the tensor memory accelerator wants a multiple of.
KEYS, ROW = 16, 128


class Scales(NamedTuple):
    """By batch index and query head: the factors of q·kᵀ and of what is summed over v."""

    products: Array
    values: Array


def quantize(q: Array, k: Array, v: Array) -> tuple[tuple[Array, Array, Array], Scales]:
    """q and k, and v as [b, heads, features, keys], in e4m3; and the scales."""
    k, v = (jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROW), (0, 0), (0, 0)]) for x in (k, v))
    (q, q_scale), (k, k_scale), (v, v_scale) = map(_rounded, (q, k, v))
    B, K, G, V = v.shape
    v = v.reshape(B, K // KEYS, 2, 4, 2, G, V).transpose(0, 5, 6, 1, 3, 2, 4).reshape(B, G, V, K)
    group = q.shape[2] // G
    return (q, k, v), Scales(q_scale * jnp.repeat(k_scale, group, axis=1), jnp.repeat(v_scale, group, axis=1))


def _rounded(x: Array) -> tuple[Array, Array]:
    """x / scale in e4m3, and the scale [b, heads], by which the greatest number becomes the greatest of e4m3."""
    scale = jnp.maximum(jnp.abs(x).max(axis=(1, 3)).astype(jnp.float32) / GREATEST, jnp.finfo(jnp.float32).tiny)
    return (x.astype(jnp.float32) * (1 / scale)[:, None, :, None]).astype(E4M3), scale


def operand(p: Array) -> Array:
    """The weights in e4m3 as the first operand of a product, with the keys in the order of `quantize`."""
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
