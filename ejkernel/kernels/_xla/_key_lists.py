"""Attention of each token over a list of keys, as in DeepSeek's sparse attention, as pages of one slot each.

A list has positions of keys in the sequence of its token, which sees those of them that it would see without the list.
Their slots in the pool are looked up once, and become a block table of the token itself. So attention over pages also
attends over lists: an entry of the list is a position, and a slot is a page.

    t tokens · k keys of a list · p pages · s slots of a page
"""

import jax.numpy as jnp
from jax import Array

from ._pages import Queries, visible


def listed_slots(x: Queries, indices: Array, block_tables: Array, pages: int, size: int) -> Array:
    """The slots int32 [t,k], of the p · s of the pool, of the keys in the lists [t,k].

    They are −1 for entries that are no key that the token sees.
    """
    position = jnp.clip(indices, 0, block_tables.shape[1] * size - 1)
    page = jnp.clip(block_tables[x.sequence[:, None], position // size], 0, pages - 1)
    is_key = (indices == position) & visible(x, position)
    return jnp.where(is_key, page * size + position % size, -1)


def ends_of_lists(slots: Array) -> Array:
    """The number of entries of each list up to its last key, int32 [t]."""
    entry = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(slots >= 0, entry, 0).max(1)


def in_lists(x: Queries, slots: Array) -> Queries:
    """The queries, with a list as the sequence of each; entries that are no keys are hidden by the draft mask."""
    zero = jnp.zeros_like(x.first)
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return x._replace(sequence=token, first=zero, stop=ends_of_lists(slots), cached=zero, draft=slots >= 0)
