"""Work lists: the grid of a TPU kernel over tiles of rows whose segments are known only at run time.

A kernel reads rows in tiles of a fixed size, aligned to that size, and a tile may hold rows of several segments (groups
of a grouped matmul, sequences of a pooling). A work item is one step of the grid: the rows of one segment in one tile.
The items of a tile, or of a segment, are consecutive, so that their accumulator stays in vector memory. XLA computes
the list; the kernel has it in scalar memory, where its index maps look up the next blocks to copy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl


class WorkItem(NamedTuple):
    """A step of the grid: batch index, tile, number of the segment in a list, and the rows start ≤ i < end of it.

    Unused work items at the end of a list repeat the last one, without rows.
    """

    batch: Any
    tile: Any
    segment: Any
    start: Any
    end: Any


def most_work_items(rows: int, size: int, segments: int) -> int:
    """The most work items that a batch element can have if every segment has at least one."""
    return pl.cdiv(rows, size) + segments


def work_list(
    batch: Array, starts: Array, ends: Array, size: int, count: int, *, at_least: int = 0, active: Array | bool = True
) -> Array:
    """The work items of segments in order, field by field, as int32 [5 · count].

    Every segment has an item for each of its tiles, an empty one `at_least` many. The items of a segment that is not
    `active` have no rows.
    """
    # An empty segment gets the tile of the row before it, as there may be no tile after the last row.
    first = jnp.where(ends > starts, starts, jnp.maximum(starts - 1, 0)) // size
    needed = jnp.where(ends > starts, (ends - 1) // size - first + 1, at_least)
    after = jnp.cumsum(needed, dtype=jnp.int32)
    item = jnp.arange(count, dtype=jnp.int32)
    used = jnp.minimum(item, after[-1] - 1)
    segment = jnp.minimum(jnp.searchsorted(after, used, side="right").astype(jnp.int32), len(starts) - 1)
    tile = first[segment] + used - (after - needed)[segment]
    has_rows = (item < after[-1]) & jnp.broadcast_to(active, starts.shape)[segment]
    fields = WorkItem(
        batch[segment],
        tile,
        segment,
        starts[segment],
        jnp.where(has_rows, ends[segment], starts[segment]),
    )
    return jnp.concatenate(jax.tree.map(lambda x: x.astype(jnp.int32), fields))


def work_list_of_all_tiles(bounds: Array, rows: int, size: int) -> Array:
    """The work list of all tiles of `rows` rows in each batch element, for the e segments between `bounds` [b, e + 1].

    The rows before and after the segments count as two more, numbers 0 and e + 1, whose items have no rows.
    """
    b, e = bounds.shape[0], bounds.shape[1] - 1
    bounds = jnp.pad(bounds, ((0, 0), (1, 0)))
    after = jnp.pad(bounds[:, 1:], ((0, 0), (0, 1)), constant_values=rows)
    segment, batch = jnp.tile(jnp.arange(e + 2), b), jnp.repeat(jnp.arange(b), e + 2)
    active = (segment > 0) & (segment <= e)
    count = b * most_work_items(rows, size, e + 2)
    return work_list(batch, bounds.reshape(-1), after.reshape(-1), size, count, active=active)


def segment_in_batch(item: WorkItem, segments: int) -> Array:
    """The segment, 0 to e − 1, of an item from `work_list_of_all_tiles`; the nearest one for rows outside of all."""
    return jnp.clip(item.segment - item.batch * (segments + 2) - 1, 0, segments - 1)


def count_of(items: Any) -> int:
    """The number of work items of a list, which is an array, or a ref in a kernel."""
    return items.shape[0] // len(WorkItem._fields)


def item_at(items: Any, step: Any) -> WorkItem:
    """The work item of a step."""
    count = count_of(items)
    return WorkItem(*(items[field * count + step] for field in range(len(WorkItem._fields))))


def is_first(items: Any, step: Any, key: Callable[[WorkItem], Any]) -> Any:
    """Whether this work item is the first of those with its `key`, a number that is computed from an item."""
    before = item_at(items, jnp.maximum(step - 1, 0))
    return (step == 0) | (key(item_at(items, step)) != key(before))


def is_last(items: Any, step: Any, key: Callable[[WorkItem], Any]) -> Any:
    """Whether this work item is the last of those with its `key`."""
    last = count_of(items) - 1
    after = item_at(items, jnp.minimum(step + 1, last))
    return (step == last) | (key(item_at(items, step)) != key(after))


def is_first_of_tile(items: Any, step: Any) -> Any:
    """Whether this work item is the first of its tile."""
    return is_first(items, step, lambda item: item.batch * items.shape[0] + item.tile)


def row_mask(item: WorkItem, size: int) -> Array:
    """Which rows of its tile a work item computes, bool [size, 1]."""
    row = item.tile * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= item.start) & (row < item.end)


def largest_block(size: int, limit: int) -> int:
    """The largest multiple of 128 up to `limit` that divides `size`; `size` itself if there is none."""
    return next((part for part in range(limit // 128 * 128, 0, -128) if size % part == 0), size)
