"""Lists of blocks that are kept, and orders of such lists, made by counting while a program runs.

A block is the n-th of its list if n kept ones stand before it. No list is sorted: a GPU's sorts of many short lists
take as long as the attention over a few of the blocks.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def entries_of(kept: Array) -> Array:
    """Bool […,N] → int32 […,N]: the numbers of the kept ones in ascending order, behind which stands N."""
    through = jnp.cumsum(kept.reshape(-1, kept.shape[-1]), 1, dtype=jnp.int32)
    place = jnp.arange(kept.shape[-1], dtype=jnp.int32)
    # The n-th one is the first up to which n + 1 are kept.
    find = lambda row: jnp.searchsorted(row, place, side="right", method="scan_unrolled")
    return jax.vmap(find)(through).astype(jnp.int32).reshape(kept.shape)


def full_first(some: Array, full: Array) -> tuple[Array, Array, Array]:
    """Of each list […,N] of the blocks that are to be computed: its length, how many of them are full, and the blocks.

    Full ones, which need no mask, come first, and each kind in ascending order.
    """
    number = lax.broadcasted_iota(jnp.int32, some.shape, some.ndim - 1)
    length, of_full = (kept.sum(-1, dtype=jnp.int32) for kept in (some, some & full))
    of_both = entries_of(some & full), entries_of(some & ~full)
    after = jnp.take_along_axis(of_both[1], jnp.maximum(number - of_full[..., None], 0), -1)
    return length, of_full, jnp.where(number < of_full[..., None], of_both[0], after)


def longest_first(lengths: Array) -> Array:
    """int32 […,N] → int32 […,N]: the numbers of the lists, the longest first, of equal ones the first."""
    here, there = lengths[..., :, None], lengths[..., None, :]
    number = jnp.arange(lengths.shape[-1], dtype=jnp.int32)
    rank = ((there > here) | ((there == here) & (number < number[:, None]))).sum(-1, dtype=jnp.int32)
    return jnp.where(rank[..., None, :] == number[:, None], number, 0).sum(-1, dtype=jnp.int32)
