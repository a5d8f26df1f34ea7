"""Attention of each token over a list of keys, as DeepSeek's sparse attention has it: pages of one slot each.

A list names keys by their positions in the sequence of its token. Of these the token sees those that it would see
without the list. Where they stand in the pool is found once, and becomes a table of the token's own, so that what
attends over pages attends over lists: an entry of the list is a position, and a slot is a page.

    t tokens · k keys of a list · p pages · s slots of a page
"""

import jax.numpy as jnp
from jax import Array

from ._pages import Queries, visible


def listed_slots(x: Queries, indices: Array, block_tables: Array, pages: int, size: int) -> Array:
    """[t,k] int32: the slots of the pool, p · s of them, where the keys of the lists [t,k] stand.

    −1 is where a list names no key that its token sees.
    """
    position = jnp.clip(indices, 0, block_tables.shape[1] * size - 1)
    page = jnp.clip(block_tables[x.sequence[:, None], position // size], 0, pages - 1)
    is_key = (indices == position) & visible(x, position)
    return jnp.where(is_key, page * size + position % size, -1)


def ends_of_lists(slots: Array) -> Array:
    """[t] int32: how many entries of each list there are up to the last that is a key."""
    entry = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(slots >= 0, entry, 0).max(1)


def in_lists(x: Queries, slots: Array) -> Queries:
    """The queries, each with its list for a sequence: entries that are no keys are drafts that it does not see."""
    zero = jnp.zeros_like(x.first)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return x._replace(sequence=token, first=zero, stop=ends_of_lists(slots), cached=zero, draft=slots >= 0)
