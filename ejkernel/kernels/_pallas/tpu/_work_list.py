"""Work lists: segments of rows whose ends are known at run time, tile by tile on the grid of a TPU kernel.

A kernel reads rows in tiles of a fixed size that begin at its multiples, and a tile may hold rows of several segments
(groups of a grouped matmul, sequences of a pooling). A work item is one step of the grid: the rows of one segment in
one tile. The items of a tile, or of a segment, follow one another, so that what is accumulated for it stays on the
chip. XLA computes the list; the kernel has it in scalar memory, where its index maps read which blocks to copy next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl


class WorkItem(NamedTuple):
    """The batch index, the tile, the segment by its number in a list, and its rows from `start` to before `end`.

    The work items left over at the end of a list repeat the last one without rows.
    """

    batch: Any
    tile: Any
    segment: Any
    start: Any
    end: Any


def most_work_items(rows: int, size: int, segments: int) -> int:
    """How many work items a batch element has at most, if every segment has at least one."""
    return pl.cdiv(rows, size) + segments


def work_list(
    batch: Array, starts: Array, ends: Array, size: int, count: int, *, at_least: int = 0, active: Array | bool = True
) -> Array:
    """[5 · count] int32, the fields of all work items one after the other, for segments in the order of the list.

    Every segment has an item for each of its tiles, and `at_least` so many if it is empty. The items of one that is not
    `active` have no rows.
    """
    # That of an empty segment is the tile of the row before it: behind the last row there may be none.
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
    """The work list of all tiles of `rows` in each batch: of segments that lie between `bounds` [b, e + 1].

    Before and after these e segments of a batch are two more, numbers 0 and e + 1, whose items have no rows.
    """
    b, e = bounds.shape[0], bounds.shape[1] - 1
    bounds = jnp.pad(bounds, ((0, 0), (1, 0)))
    after = jnp.pad(bounds[:, 1:], ((0, 0), (0, 1)), constant_values=rows)
    segment, batch = jnp.tile(jnp.arange(e + 2), b), jnp.repeat(jnp.arange(b), e + 2)
    active = (segment > 0) & (segment <= e)
    count = b * most_work_items(rows, size, e + 2)
    return work_list(batch, bounds.reshape(-1), after.reshape(-1), size, count, active=active)


def segment_in_batch(item: WorkItem, segments: int) -> Array:
    """Which of the e segments of its batch an item of such a list is for, or next to."""
    return jnp.clip(item.segment - item.batch * (segments + 2) - 1, 0, segments - 1)


def count_of(items: Any) -> int:
    """How many work items there are, in a kernel, where the list is a ref, or before."""
    return items.shape[0] // len(WorkItem._fields)


def item_at(items: Any, step: Any) -> WorkItem:
    """The work item of a step."""
    count = count_of(items)
    return WorkItem(*(items[field * count + step] for field in range(len(WorkItem._fields))))


def is_first(items: Any, step: Any, key: Callable[[WorkItem], Any]) -> Any:
    """Whether the work item before has another `key`, a number that is computed from an item."""
    before = item_at(items, jnp.maximum(step - 1, 0))
    return (step == 0) | (key(item_at(items, step)) != key(before))


def is_last(items: Any, step: Any, key: Callable[[WorkItem], Any]) -> Any:
    """Whether the next work item has another `key`."""
    last = count_of(items) - 1
    after = item_at(items, jnp.minimum(step + 1, last))
    return (step == last) | (key(item_at(items, step)) != key(after))


def is_first_of_tile(items: Any, step: Any) -> Any:
    """Whether the work item before is of another tile."""
    return is_first(items, step, lambda item: item.batch * items.shape[0] + item.tile)


def row_mask(item: WorkItem, size: int) -> Array:
    """[size, 1] bool: the rows of the tile that the work item is for."""
    row = item.tile * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= item.start) & (row < item.end)


def largest_block(size: int, limit: int) -> int:
    """The largest multiple of 128 that divides a size and is not above `limit`; the size where none is."""
    return next((part for part in range(limit // 128 * 128, 0, -128) if size % part == 0), size)
