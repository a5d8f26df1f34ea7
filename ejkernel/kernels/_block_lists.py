"""Lists of kept blocks, and the order of such lists by length, computed on the device by counting.

A block is the n-th of its list if n kept blocks precede it. Lists are not sorted, since sorting many short lists on a
GPU takes as long as the attention over a few of the blocks.
"""

import jax.numpy as jnp
from jax import Array


def entries_of(kept: Array, most: int | None = None) -> Array:
    """The indices of the True entries, ascending and filled up with N: bool […,N] → int32 […,N], or the `most` first.

    The n-th kept entry is the first at which the cumulative count is n + 1. It is looked for among chunks of about √N
    entries, then in its chunk, each time by comparing with all: a binary search takes XLA more kernels.
    """
    entries = kept.shape[-1]
    size = 1 << ((entries - 1).bit_length() + 1) // 2
    chunks = -(-entries // size)
    rows = jnp.pad(kept.reshape(-1, entries), ((0, 0), (0, chunks * size - entries))).reshape(-1, chunks, size)
    within = jnp.cumsum(rows, 2, dtype=jnp.int32)
    ends = jnp.cumsum(rows.sum(2, dtype=jnp.int32), 1)[:, None]
    number = jnp.arange(entries if most is None else most, dtype=jnp.int32)
    is_before = ends <= number[:, None]
    chunk, before = is_before.sum(2, dtype=jnp.int32), jnp.where(is_before, ends, 0).max(2)
    row = jnp.arange(len(rows), dtype=jnp.int32)[:, None] * chunks
    of_chunk = within.reshape(-1, size)[row + jnp.minimum(chunk, chunks - 1)]
    place = (of_chunk <= (number - before)[:, :, None]).sum(2, dtype=jnp.int32)
    found = jnp.where(chunk < chunks, chunk * size + place, entries)
    return found.reshape(*kept.shape[:-1], -1)


def full_first(some: Array, full: Array) -> tuple[Array, Array, Array]:
    """For each list […,N] of blocks to compute: its length, the number of full blocks, and the blocks.

    Full blocks, which need no mask, come first; both kinds are in ascending order.
    """
    blocks = some.shape[-1]
    length, of_full = (kept.sum(-1, dtype=jnp.int32) for kept in (some, some & full))
    found = entries_of(jnp.concatenate((some & full, some & ~full), -1), blocks)
    return length, of_full, jnp.where(found < blocks, found, found - blocks)


def longest_first(lengths: Array) -> Array:
    """The indices of lists in descending order of length, stable for equal lengths: int32 […,N] → int32 […,N]."""
    here, there = lengths[..., :, None], lengths[..., None, :]
    number = jnp.arange(lengths.shape[-1], dtype=jnp.int32)
    rank = ((there > here) | ((there == here) & (number < number[:, None]))).sum(-1, dtype=jnp.int32)
    return jnp.where(rank[..., None, :] == number[:, None], number, 0).sum(-1, dtype=jnp.int32)
