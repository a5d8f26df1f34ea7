"""Segments of rows whose ends are known at run time, visited tile by tile on a TPU.

A kernel reads rows in tiles of a fixed size that begin at its multiples, and a tile may hold rows of several segments.
It is visited once for each of them, in a row, so that what is gathered for a tile or for a segment stays on the chip.
The list of visits is computed by XLA and handed to the kernel in scalar memory, which knows so what to fetch next.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl


class Visits(NamedTuple):
    """For each visit the batch, the tile, the segment by its number in a list, and its rows from `start` to `end`.

    The visits left over at the end repeat the last one without rows.
    """

    batch: Any
    tile: Any
    segment: Any
    start: Any
    end: Any


def most_visits(rows: int, size: int, segments: int) -> int:
    """How many visits a batch can take if every segment is visited at least once."""
    return pl.cdiv(rows, size) + segments


def visits(
    batch: Array, starts: Array, ends: Array, size: int, count: int, *, at_least: int = 0, computed: Array | bool = True
) -> Array:
    """[5 · count] int32, the fields of Visits after one another, for the segments listed in the order of their visits.

    Every segment has its tiles, and `at_least` so many visits if it is empty. One that is not `computed` has visits,
    but no rows.
    """
    first = jnp.minimum(starts, ends) // size
    needed = jnp.where(ends > starts, (ends - 1) // size - first + 1, at_least)
    after = jnp.cumsum(needed, dtype=jnp.int32)
    visit = jnp.arange(count, dtype=jnp.int32)
    used = jnp.minimum(visit, after[-1] - 1)
    segment = jnp.minimum(jnp.searchsorted(after, used, side="right").astype(jnp.int32), len(starts) - 1)
    tile = first[segment] + used - (after - needed)[segment]
    has_rows = (visit < after[-1]) & jnp.broadcast_to(computed, starts.shape)[segment]
    fields = Visits(
        batch[segment],
        tile,
        segment,
        starts[segment],
        jnp.where(has_rows, ends[segment], starts[segment]),
    )
    return jnp.concatenate(jax.tree.map(lambda x: x.astype(jnp.int32), fields))


def covering_visits(bounds: Array, rows: int, size: int) -> Array:
    """The visits of all tiles of `rows` in each batch: of segments that lie between `bounds` [b, e + 1].

    Before and after these e segments of a batch are two more, numbers 0 and e + 1, which are visited but not computed.
    """
    b, e = bounds.shape[0], bounds.shape[1] - 1
    bounds = jnp.pad(bounds, ((0, 0), (1, 0)))
    after = jnp.pad(bounds[:, 1:], ((0, 0), (0, 1)), constant_values=rows)
    segment, batch = jnp.tile(jnp.arange(e + 2), b), jnp.repeat(jnp.arange(b), e + 2)
    computed = (segment > 0) & (segment <= e)
    count = b * most_visits(rows, size, e + 2)
    return visits(batch, bounds.reshape(-1), after.reshape(-1), size, count, computed=computed)


def covered_segment(visit: Visits, segments: int) -> Array:
    """Which of the e segments of its batch such a visit is for, or next to."""
    return jnp.clip(visit.segment - visit.batch * (segments + 2) - 1, 0, segments - 1)


def tile_begins(table: Any, visit: Any) -> Any:
    """Whether the visit before was to another tile."""
    return begins(table, visit, lambda v: v.batch * table.shape[0] + v.tile)


def count_of(table: Any) -> int:
    """How many visits there are."""
    return table.shape[0] // len(Visits._fields)


def at(table: Any, visit: Any) -> Visits:
    """The fields of one visit."""
    count = count_of(table)
    return Visits(*(table[field * count + visit] for field in range(len(Visits._fields))))


def begins(table: Any, visit: Any, same) -> Any:
    """Whether `same` (of a Visits, something that may be compared) is another than in the visit before."""
    before = at(table, jnp.maximum(visit - 1, 0))
    return (visit == 0) | (same(at(table, visit)) != same(before))


def ends(table: Any, visit: Any, same) -> Any:
    """Whether it is another in the next visit."""
    last = count_of(table) - 1
    after = at(table, jnp.minimum(visit + 1, last))
    return (visit == last) | (same(at(table, visit)) != same(after))


def rows_inside(visit: Visits, size: int) -> Array:
    """[size, 1] bool: the rows of the tile that the visit is for."""
    row = visit.tile * size + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (row >= visit.start) & (row < visit.end)


def cut(size: int, most: int) -> int:
    """The largest multiple of 128 that divides a size and is not above `most`; the size where none is."""
    return next((part for part in range(most // 128 * 128, 0, -128) if size % part == 0), size)
