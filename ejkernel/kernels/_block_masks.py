"""Block masks in tiles of a kernel, each of which is within one block."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives.blocksparse_attention import Operands


def kept_tiles(x: Operands, block_size: tuple[int, int], tile: tuple[int, int]) -> Array:
    """Whether the block mask keeps a tile: bool [b?,h?,rows,columns] of tiles, which divide blocks if there are several
    along an axis.
    """
    kept, lengths = x.block_mask, (x.q.shape[1], x.k.shape[1])
    for axis, (length, size, block) in enumerate(zip(lengths, tile, block_size, strict=True), 2):
        if size != block:
            kept = jnp.take(kept, np.arange(math.ceil(length / size)) * size // block, axis=axis)
    return kept
