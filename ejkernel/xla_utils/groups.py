"""Bounds and tiles of consecutive groups of rows, whose sizes are known only at run time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim

from .search import entries_until
from .symbolic import at_most


def group_bounds(group_sizes: Array, group_offset: Array | None, groups: int, rows: int) -> Array:
    """[b?, groups + 1] int32: where each of the groups from `group_offset` [b?] on begins, and where the last ends."""
    ends = _capped_sums(group_sizes, rows)
    bounds = jnp.pad(ends, ((0, 0), (1, 0)))
    if group_offset is None:
        return bounds
    first = jnp.clip(group_offset, 0, group_sizes.shape[-1])
    at = jnp.minimum(first[:, None] + jnp.arange(groups + 1, dtype=jnp.int32)[None], group_sizes.shape[-1])
    batch = max(at.shape[0], bounds.shape[0])
    bounds, at = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (bounds, at))
    return jnp.take_along_axis(bounds, at, axis=1)


def _capped_sums(sizes: Array, most: int) -> Array:
    """min(Σ_{h≤g} sizes_h, most) for each g, without overflow: sizes may add up to more than int32 holds."""
    sizes = jnp.clip(sizes, 0, most)
    if not is_symbolic_dim(most) and not is_symbolic_dim(sizes.shape[-1]) and sizes.shape[-1] * most < 2**31:
        return jnp.minimum(jnp.cumsum(sizes, axis=-1, dtype=jnp.int32), most)
    add = lambda a, b: jnp.minimum(a + b, jnp.asarray(most, jnp.uint32))
    return lax.associative_scan(add, sizes.astype(jnp.uint32), axis=-1).astype(jnp.int32)


class RowTiles(NamedTuple):
    """Tiles of rows, each of one group.

    rows [b, t, size]: the row in each slot of a tile; the number of all rows for an empty slot.
    group [b, t]: the group of each tile; a tile without rows has that of a tile with rows, if there is any.
    slot [b, rows]: the slot of each row, counted over all tiles; t · size if it is in no group.
    """

    rows: Array
    group: Array
    slot: Array


def row_tiles(starts: Array, ends: Array, rows: int, size: int) -> RowTiles:
    """The tiles of groups that are the rows from `starts` to `ends`, [b, e] each, ascending and without overlap.

    Of t tiles, Σ_e ⌈rows_e / size⌉ ≤ (rows + e·(size − 1)) / size, those that are not needed come last, and are empty.
    """
    groups = starts.shape[1]
    count = (rows + at_most(groups, rows) * (size - 1)) // size
    needed = -(-(ends - starts) // size)
    after = jnp.cumsum(needed, axis=1, dtype=jnp.int32)
    before = after - needed
    take = lambda of, at: jnp.take_along_axis(of, at, axis=1)

    tile = jnp.arange(count, dtype=jnp.int32)[None]
    number = _first_above(after, tile[0])
    last = jnp.max(jnp.where(needed > 0, jnp.arange(groups, dtype=jnp.int32), 0), axis=1, keepdims=True)
    group = jnp.minimum(number, last)
    first = take(starts, group) + (tile - take(before, group)) * size
    row = first[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]
    filled = (row < take(ends, group)[..., None]) & (number < groups)[..., None]

    token = jnp.arange(rows, dtype=jnp.int32)[None]
    number = _first_above(ends, token[0])
    owner = jnp.minimum(number, groups - 1)
    place = token - take(starts, owner)
    slot = take(before, owner) * size + place
    return RowTiles(
        rows=jnp.where(filled, row, rows),
        group=group,
        slot=jnp.where((number < groups) & (place >= 0), slot, count * size),
    )


def _first_above(ends: Array, values: Array) -> Array:
    """For each value the index of the first of the ends [b, e] that is larger, [b, values]; e if none is."""
    return jax.vmap(entries_until, (0, None))(ends, values)
