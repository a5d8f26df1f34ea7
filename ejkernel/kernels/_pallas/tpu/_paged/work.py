"""What a kernel over a cache computes, step by step: work items, from lengths that may be traced.

A query tile is the heads of some tokens. A work item is one step of the grid: those tokens of a tile that are of one
sequence, with the keys that they see. XLA computes the items; the kernel has them in scalar memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class WorkItem(NamedTuple):
    """The numbers of a work item.

    Attributes:
        tile: of queries.
        sequence: row of the block tables.
        batch: which batch element the sequence is of.
        first, stop: the keys first ≤ j < stop that some token of it sees; 0 and 0 for none.
        position: where the first token of the tile would stand in the sequence.
        cached: where its new tokens begin, of which drafts say who sees them.
        begin, end: its tokens begin ≤ i < end of the tile.
        before: how many blocks of keys the items before it have.
        following: the next item that has any; the number of items if there is none.
    """

    tile: Any
    sequence: Any
    batch: Any
    first: Any
    stop: Any
    position: Any
    cached: Any
    begin: Any
    end: Any
    before: Any
    following: Any


def blocks_of(first: Any, stop: Any, keys: int) -> Any:
    """How many blocks, of so many keys that begin at a multiple of that, hold keys first ≤ j < stop."""
    return jnp.where(stop > first, lax.div(stop + (keys - 1), keys) - lax.div(first, keys), 0)


def listed(keys: int, *, tile: Array, **fields: Any) -> Array:
    """The work items one field after the other, int32 [11 · n], of blocks of so many keys.

    Of the fields, `before` and `following` follow from the others, and those of a tile of one token are known.
    """
    (n,), first = tile.shape, jnp.maximum(fields["first"], 0)
    blocks = blocks_of(first, fields["stop"], keys)
    with_blocks = jnp.where(blocks > 0, jnp.arange(n, dtype=jnp.int32), n)
    following = jnp.append(lax.cummin(with_blocks, reverse=True)[1:], n)
    before = jnp.cumsum(blocks, dtype=jnp.int32) - blocks
    fields = dict(position=0, cached=0, begin=0, end=1) | fields | dict(first=first)
    item = WorkItem(tile=tile, before=before, following=following, **fields)
    return jnp.concatenate([jnp.broadcast_to(jnp.asarray(x, jnp.int32), (n,)) for x in item])


def count_of(items: Any) -> int:
    """How many work items there are, in a kernel, where the list is a ref, or before."""
    return items.shape[0] // len(WorkItem._fields)


def item_at(items: Any, step: Any) -> WorkItem:
    """The work item of a step."""
    count = count_of(items)
    return WorkItem(*(items[field * count + step] for field in range(len(WorkItem._fields))))
