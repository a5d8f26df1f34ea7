"""The forward kernel: that of flash_attention, where each tile of queries streams the blocks of keys in its list."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._block_lists import full_first
from ejkernel.kernels._block_masks import kept_tiles
from ejkernel.kernels._visibility import BlockRanges, visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from ..flash_attention import configs as of_flash
from ..flash_attention.forward import attention
from ..flash_attention.mask_info import MaskInfo
from .configs import check


def blocksparse_attention(*operands: Array | None, spec: BlocksparseAttentionSpec, config: KernelConfig) -> Outputs:
    x, tile = Operands(*operands), (config.block_q, config.block_k)
    of_flash.check("flash_attention", config, block_k=of_flash.blocks_of_keys(x.v.shape[3]))
    check("blocksparse_attention", tile, x, spec)
    return attention(x.attention, spec, config, mask_info_of(*tiles(x, spec, tile)))


def tiles(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> tuple[Array, Array]:
    """Which tiles have to be computed, and which of them need no mask: bool [b?,h?,rows,columns]."""
    some, full = (shown[:, None] for shown in visibility_of(x.attention, spec).blocks(*tile))
    some = kept_tiles(x, spec.block_size, tile) & some
    return some, some & full


def mask_info_of(some: Array, full: Array) -> MaskInfo:
    """The lists of the tiles that each row of tiles computes.

    A kernel has at least one step; for an empty list, that step computes a fully masked block past the last key.
    """
    length, of_full, blocks = full_first(some, full)
    none = jnp.zeros_like(length)
    ranges = BlockRanges(none, jnp.maximum(length, 1), none, of_full)
    return MaskInfo(jnp.stack(ranges, -1), None, None, blocks)
