"""The bias and the mask, which have a number for each pair of a query and a key.

The producer loads tiles of the bias into shared memory by TMA, beside v in the forward, beside q in the backward. A
mask is packed into words before the kernel runs, 1/8 of its bytes: 32 keys in the forward, 32 queries in the backward,
whose tiles have keys as rows. Of a block a row has one to four words, which its threads load from device memory while
the products are computed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import Visibility
from ejkernel.primitives.flash_attention import Operands

from .._inline.registers import BITS
from .._launch import PER_ROW, ROWS, WGMMA, load_vector, shared
from .feature_tiles import union
from .mask_info import same
from .plan import Plan


class Pairs(NamedTuple):
    """bias [b?, h?, S, K]. bits [b?, h?, words, rows], int32: bit n of word w is column 32·w + n; None without.

    Rows are the queries and columns the keys in the forward, the other way round in the backward.
    """

    bias: Any
    bits: Any

    def words(self, batch: Array, head: Array, row: Array, first: Array, columns: int) -> Sequence[Array]:
        """In a kernel: the words of so many columns, from the word `first` on, of 64 rows."""
        if self.bits is None:
            return ()
        here, rows = same(self.bits, batch, head), pl.ds(row, ROWS)
        words = (self.bits.at[*here, first + n, rows] for n in range(columns // BITS))
        return [load_vector(x, PER_ROW, optimized=False) for x in words]

    def tile_of_bias(self, batch: Array, head: Array, queries: pl.Slice, keys: pl.Slice) -> Any:
        """In a kernel: the ref of a tile of the bias."""
        return self.bias.at[*same(self.bias, batch, head), queries, keys]


def pairs_of(operands: Operands, plan: Plan) -> Pairs | None:
    """The bias and the bits of the mask, which are 0 up to the ends of the last tiles."""
    if operands.mask is None:
        return None if operands.bias is None else Pairs(operands.bias, None)
    queries, keys = plan.q_tiles * plan.block_q, -(-operands.mask.shape[3] // plan.block_k) * plan.block_k
    return Pairs(operands.bias, _words(operands.mask, queries, keys, axis=3).swapaxes(2, 3))


def pairs_of_keys(operands: Operands, visibility: Visibility, queries: int, keys: int) -> Pairs | None:
    """The same of the backward, whose rows are keys, up to so many queries and keys.

    With a mask the bits are of all that hides a pair, so that a consumer, which has no registers to spare, asks nothing
    else.
    """
    if operands.mask is None:
        return None if operands.bias is None else Pairs(operands.bias, None)
    return Pairs(operands.bias, _words(visibility.pairs(), queries, keys, axis=2))


def _words(mask: Array, queries: int, keys: int, axis: int) -> Array:
    """A mask [b, h, S, K] as bits of int32, 32 along an axis a word, with zeros up to so many queries and keys."""
    *_, S, K = mask.shape
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, queries - S), (0, keys - K)))
    shape = mask.shape
    bits = mask.reshape(*shape[:axis], shape[axis] // BITS, BITS, *shape[axis + 1 :]).astype(jnp.uint32)
    place = jnp.arange(BITS, dtype=jnp.uint32)
    bits <<= place if axis == 3 else place[:, None]
    return jax.lax.bitcast_convert_type(bits.sum(axis + 1, dtype=jnp.uint32), jnp.int32)


def scratch_of_bias(bias: Array | None, plan: Plan) -> dict:
    """Tiles of the bias and their full barriers."""
    if bias is None:
        return {}
    full = plgpu.Barrier(num_barriers=plan.stages, num_arrivals=1)
    return dict(bias_tiles=tiles_of_bias(bias, plan.stages, plan.block_q, plan.block_k), bias_full=full)


def tiles_of_bias(bias: Array, *shape: int) -> Any:
    """The scratch memory of tiles of the bias, as a warpgroup reads them and as TMA copies them, row after row."""
    of_tiles = shared(shape, bias.dtype)
    row = plgpu.SwizzleTransform(shape[-1] * bias.dtype.itemsize)
    return union((of_tiles,), (plgpu.SMEM(shape, bias.dtype, transforms=(row,)),))


def transposed_bias(tile: Any, scale: Array | float) -> Array:
    """bias / scale of a tile [queries, keys] in shared memory, as what the accumulator of k·qᵀ begins with."""
    if jax.__version_info__ >= (0, 11):
        return load_vector(tile.T, WGMMA).astype(jnp.float32) * (1 / scale)
    # JAX before does not load by ldmatrix.trans: pairs of keys, which shuffles turn into pairs of queries.
    pairs = load_vector(tile.T, plgpu.Layout.WGMMA_TRANSPOSED)
    return plgpu.layout_cast(pairs, WGMMA).astype(jnp.float32) * (1 / scale)


def biased(products: Array, tile: Any, scale: float) -> Array:
    """q·kᵀ + bias / scale, whose scaled sum is that of both."""
    return products + load_vector(tile, WGMMA).astype(jnp.float32) * (1 / scale)
