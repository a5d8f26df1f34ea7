"""Block masks at the granularity of a kernel's tiles, each of which is within one block."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.blocksparse_attention import Operands


def kept_tiles(x: Operands, block_size: tuple[int, int], tile: tuple[int, int]) -> Array:
    """Whether the block mask keeps each tile: bool [b?,h?,rows,columns].

    Tile sizes must divide block sizes along every axis with several blocks.
    """
    kept, lengths = x.block_mask, (x.q.shape[1], x.k.shape[1])
    for axis, (length, size, block) in enumerate(zip(lengths, tile, block_size, strict=True), 2):
        if size != block:
            kept = jnp.take(kept, np.arange(math.ceil(length / size)) * size // block, axis=axis)
    return kept
