"""The bias and the mask of the forward, which have a number for each pair of a query and a key.

The producer loads tiles of the bias into shared memory by TMA, into the stages of v. A mask is packed into words of 32
keys before the kernel runs, 1/8 of its bytes: of a block of keys a row has two or four words, which its threads load
from device memory while the products are computed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives.flash_attention import Operands

from .._inline.registers import BITS
from .._launch import PER_ROW, ROWS, WGMMA, load_vector, shared
from .feature_tiles import union
from .mask_info import same
from .plan import Plan


class Pairs(NamedTuple):
    """bias [b?, h?, S, K]. bits [b?, h?, words, rows], int32: bit n of word w is the key 32·w + n; None without."""

    bias: Any
    bits: Any

    def words(self, batch: Array, head: Array, row: Array, block: Array, block_k: int) -> Sequence[Array]:
        """In a kernel: the words of a block of keys, of 64 rows."""
        if self.bits is None:
            return ()
        here, first = same(self.bits, batch, head), block * (block_k // BITS)
        rows = pl.ds(row, ROWS)
        words = (self.bits.at[*here, first + n, rows] for n in range(block_k // BITS))
        return [load_vector(x, PER_ROW, optimized=False) for x in words]

    def tile_of_bias(self, batch: Array, head: Array, first: Array, block: Array, plan: Plan) -> Any:
        """In a kernel: the ref of a tile of the bias."""
        rows, keys = pl.ds(first, plan.block_q), pl.ds(block * plan.block_k, plan.block_k)
        return self.bias.at[*same(self.bias, batch, head), rows, keys]


def pairs_of(operands: Operands, plan: Plan) -> Pairs | None:
    """The bias and the bits of the mask, which are 0 up to the ends of the last tiles."""
    if operands.mask is None:
        return None if operands.bias is None else Pairs(operands.bias, None)
    B, H, S, K = operands.mask.shape
    rows, keys = plan.q_tiles * plan.block_q, -(-K // plan.block_k) * plan.block_k
    mask = jnp.pad(operands.mask, ((0, 0), (0, 0), (0, rows - S), (0, keys - K)))
    bits = mask.reshape(B, H, rows, keys // BITS, BITS).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(bits.sum(-1, dtype=jnp.uint32), jnp.int32)
    return Pairs(operands.bias, words.swapaxes(2, 3))


def scratch_of_bias(bias: Array | None, plan: Plan) -> dict:
    """Tiles of the bias, as a warpgroup reads them and as TMA copies them, row after row, and their full barriers."""
    if bias is None:
        return {}
    of_tiles = shared((plan.stages, plan.block_q, plan.block_k), bias.dtype)
    row = plgpu.SwizzleTransform(plan.block_k * bias.dtype.itemsize)
    copies = plgpu.SMEM(of_tiles.shape, bias.dtype, transforms=(row,))
    full = plgpu.Barrier(num_barriers=plan.stages, num_arrivals=1)
    return dict(bias_tiles=union((of_tiles,), (copies,)), bias_full=full)


def biased(products: Array, tile: Any, scale: float) -> Array:
    """q·kᵀ + bias / scale, whose scaled sum is that of both."""
    return products + load_vector(tile, WGMMA).astype(jnp.float32) * (1 / scale)
