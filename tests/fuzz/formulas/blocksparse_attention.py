"""The formula of flash_attention, where the mask has an entry for each pair of a query and a key."""

import numpy as np

from .flash_attention import formula

__all__ = ["entries", "formula"]


def entries(block_mask, block_size, S, K):
    """Whether the block of a query and a key is kept: bool [B or 1, H or 1, S, K]."""
    rows, columns = (np.arange(n) // size for n, size in zip((S, K), block_size, strict=True))
    return block_mask.reshape((1,) * (4 - block_mask.ndim) + block_mask.shape)[:, :, rows][:, :, :, columns]
