"""The work items of a kernel over a cache, computed from lengths that may be traced.

A query tile is the heads of some tokens. A work item is one step of the grid: the tokens of one sequence in a tile,
with the keys that they see. XLA computes the items; the kernel has them in scalar memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class WorkItem(NamedTuple):
    """The fields of a work item.

    Attributes:
        tile: the query tile.
        sequence: the row of the block tables.
        batch: the batch element of the sequence.
        first, stop: the range first ≤ j < stop of keys that any of its tokens sees; 0 and 0 for none.
        position: the position in the sequence of the first token of the tile, or where that would be.
        cached: the position of the first new token, from which on the draft mask decides what is visible.
        begin, end: its tokens are those begin ≤ i < end of the tile.
        before: the number of blocks of keys of all earlier items.
        following: the next item that has blocks; the number of items if there is none.
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
    """The number of blocks of `keys` keys, aligned to their size, that hold keys first ≤ j < stop."""
    return jnp.where(stop > first, lax.div(stop + (keys - 1), keys) - lax.div(first, keys), 0)


def listed(keys: int, *, tile: Array, **fields: Any) -> Array:
    """The work items for blocks of `keys` keys, field by field, as int32 [11 · n].

    `before` and `following` are computed from the other fields; some have defaults, for tiles of one token.
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
    """The number of work items of a list, which is an array, or a ref in a kernel."""
    return items.shape[0] // len(WorkItem._fields)


def item_at(items: Any, step: Any) -> WorkItem:
    """The work item of a step."""
    count = count_of(items)
    return WorkItem(*(items[field * count + step] for field in range(len(WorkItem._fields))))
