"""Lists of kept blocks, and the order of such lists by length, computed on the device by counting.

A block is the n-th of its list if n kept blocks precede it. Lists are not sorted, since sorting many short lists on a
GPU takes as long as the attention over a few of the blocks.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def entries_of(kept: Array) -> Array:
    """The indices of the True entries, ascending and filled up with N: bool […,N] → int32 […,N]."""
    through = jnp.cumsum(kept.reshape(-1, kept.shape[-1]), 1, dtype=jnp.int32)
    place = jnp.arange(kept.shape[-1], dtype=jnp.int32)
    # The n-th kept entry is the first at which the cumulative count is n + 1.
    find = lambda row: jnp.searchsorted(row, place, side="right", method="scan_unrolled")
    return jax.vmap(find)(through).astype(jnp.int32).reshape(kept.shape)


def full_first(some: Array, full: Array) -> tuple[Array, Array, Array]:
    """For each list […,N] of blocks to compute: its length, the number of full blocks, and the blocks.

    Full blocks, which need no mask, come first; both kinds are in ascending order.
    """
    number = lax.broadcasted_iota(jnp.int32, some.shape, some.ndim - 1)
    length, of_full = (kept.sum(-1, dtype=jnp.int32) for kept in (some, some & full))
    of_both = entries_of(some & full), entries_of(some & ~full)
    after = jnp.take_along_axis(of_both[1], jnp.maximum(number - of_full[..., None], 0), -1)
    return length, of_full, jnp.where(number < of_full[..., None], of_both[0], after)


def longest_first(lengths: Array) -> Array:
    """The indices of lists in descending order of length, stable for equal lengths: int32 […,N] → int32 […,N]."""
    here, there = lengths[..., :, None], lengths[..., None, :]
    number = jnp.arange(lengths.shape[-1], dtype=jnp.int32)
    rank = ((there > here) | ((there == here) & (number < number[:, None]))).sum(-1, dtype=jnp.int32)
    return jnp.where(rank[..., None, :] == number[:, None], number, 0).sum(-1, dtype=jnp.int32)
