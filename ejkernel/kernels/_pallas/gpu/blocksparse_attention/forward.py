"""The forward kernel: that of flash_attention, each of whose tiles streams the blocks of keys that its list names."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._block_lists import full_first
from ejkernel.kernels._block_masks import kept_tiles
from ejkernel.kernels._visibility import BlockRanges, visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from ..flash_attention.forward import attention
from ..flash_attention.mask_info import MaskInfo
from .configs import fits


def blocksparse_attention(*operands: Array | None, spec: BlocksparseAttentionSpec, config: KernelConfig) -> Outputs:
    x = Operands(*operands)
    if not fits(config, x, spec):
        tile = f"{config.block_q} queries and {config.block_k} keys"
        raise ValueError(f"blocksparse_attention: tiles of {tile} do not fit into blocks of {spec.block_size} here")
    return attention(x.attention, spec, config, mask_info_of(x, spec, (config.block_q, config.block_k)))


def mask_info_of(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> MaskInfo:
    """The lists of the tiles of keys that each tile of queries attends to."""
    some, full = (seen[:, None] for seen in visibility_of(x.attention, spec).blocks(*tile))
    length, of_full, blocks = full_first(kept_tiles(x, spec.block_size, tile) & some, full)
    none = jnp.zeros_like(length)
    ranges = BlockRanges(none, length, none, of_full).at_least_one(blocks.shape[-1])
    return MaskInfo(jnp.stack(ranges, -1), None, None, blocks)
