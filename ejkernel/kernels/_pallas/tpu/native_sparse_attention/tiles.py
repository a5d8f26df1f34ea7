"""What is computed of a tile of queries and some slots of keys: keys in sublanes, rows of queries in lanes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..flash_attention.tiles import contract
from .problem import Pairs, Problem, rows_in_tiles
from .records import Entry, Record, zero_from


class Rows(NamedTuple):
    """Of the rows of a tile, each [1, rows] float32: as an array they are [majors, 4, rows].

    Attributes:
        limit: a row sees the tokens before it.
        lse: +∞ for rows that see no key.
        delta: Σ_e do·o − dlse, or Σ p·dp − dlse.
        correction: what the weights exp(s − lse) are multiplied by.
    """

    limit: Any
    lse: Any
    delta: Any
    correction: Any


def rows_in(pairs: Pairs, lse: jax.Array, problem: Problem, delta: jax.Array | None = None) -> jax.Array:
    """[b·g·tiles, 4, rows] of lse and delta [b,h,s] and the limits of the pairs; no correction yet."""
    lse = rows_in_tiles(jnp.where(lse == -jnp.inf, jnp.inf, lse), problem)
    delta = jnp.zeros_like(lse) if delta is None else rows_in_tiles(delta, problem)
    return jnp.concatenate(Rows(pairs.limit, lse, delta, jnp.ones_like(lse)), axis=1)


def rows_at(ref: Any, *index: Any) -> Rows:
    """Those of a block [4, rows]."""
    return Rows(*(ref[(*index, slice(n, n + 1))] for n in range(len(Rows._fields))))


def entries_at(record: Record, first: Any, count: int) -> list[Entry]:
    """Those from the first on; what is behind the last has no keys and no members."""
    return [record.entry(first + n) for n in range(count)]


def keys_of(blocks: Sequence[Any], entries: Sequence[Entry], first: Any) -> list[jax.Array]:
    """Of each array the keys [count · keys, features] of the entries, 0 for those that no query of the tile sees."""
    count = len(entries)
    for block in blocks:
        for n, entry in enumerate(entries):
            zero_from(block, first + n, entry.keys)
    return [block[pl.ds(first, count)].reshape(-1, block.shape[2]) for block in blocks]


def visible_of(entry: Entry, limit: jax.Array, problem: Problem) -> jax.Array:
    """Which rows [1, rows] see which keys of a slot, bool [keys, rows]: those of members, before their limit."""
    rows = limit.shape[1]
    query = lax.broadcasted_iota(jnp.int32, (1, rows), 1) >> (problem.group.bit_length() - 1)
    is_member = lax.shift_right_logical(jnp.full((1, rows), entry.members, jnp.int32), query) & 1
    bound = jnp.minimum(limit - entry.begin.astype(jnp.float32), entry.keys.astype(jnp.float32))
    bound = jnp.where(is_member == 1, bound, 0)
    key = lax.broadcasted_iota(jnp.int32, (problem.keys, rows), 0).astype(jnp.float32)
    return key < bound


def weights_of(s: jax.Array, visible: jax.Array, of: Rows) -> jax.Array:
    """p = exp(s − lse), corrected, of logits [keys, rows]; 0 where not visible."""
    return jnp.where(visible, jnp.exp(s - of.lse) * of.correction, 0)


def logits(keys: jax.Array, q: jax.Array, problem: Problem) -> jax.Array:
    """scale · k·q, [keys, rows]."""
    return contract(keys, q, (1, 1)) * problem.scale
