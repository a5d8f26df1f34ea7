"""The computations of a tile of queries and some slots of keys: keys in sublanes, rows of queries in lanes."""

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
    """The values of the rows of a tile, each [1, rows] float32; of all tiles in one array [majors, 4, rows].

    Attributes:
        limit: a row sees the tokens before this position.
        lse: the logsumexp; +∞ for fully masked rows.
        delta: Σ_e do·o − dlse, or Σ p·dp − dlse.
        correction: the factor of the weights exp(s − lse).
    """

    limit: Any
    lse: Any
    delta: Any
    correction: Any


def rows_in(pairs: Pairs, lse: jax.Array, problem: Problem, delta: jax.Array | None = None) -> jax.Array:
    """The `Rows` of all tiles [b·g·tiles, 4, rows], from lse and delta [b,h,s] and the limits; no correction yet."""
    lse = rows_in_tiles(jnp.where(lse == -jnp.inf, jnp.inf, lse), problem)
    delta = jnp.zeros_like(lse) if delta is None else rows_in_tiles(delta, problem)
    return jnp.concatenate(Rows(pairs.limit, lse, delta, jnp.ones_like(lse)), axis=1)


def rows_at(ref: Any, *index: Any) -> Rows:
    """The `Rows` in a block [4, rows]."""
    return Rows(*(ref[(*index, slice(n, n + 1))] for n in range(len(Rows._fields))))


def entries_at(record: Record, first: Any, count: int) -> list[Entry]:
    """`count` entries of a record from `first` on; those past its end have no keys and no members."""
    return [record.entry(first + n) for n in range(count)]


def keys_of(blocks: Sequence[Any], entries: Sequence[Entry], first: Any) -> list[jax.Array]:
    """The keys [count · keys, features] of the entries in each array, 0 for keys that no query of the tile sees."""
    count = len(entries)
    for block in blocks:
        for n, entry in enumerate(entries):
            zero_from(block, first + n, entry.keys)
    return [block[pl.ds(first, count)].reshape(-1, block.shape[2]) for block in blocks]


def visible_of(entry: Entry, limit: jax.Array, problem: Problem) -> jax.Array:
    """Which rows see which keys of a slot, bool [keys, rows]: rows of members, and keys before the limit of the row."""
    rows = limit.shape[1]
    query = lax.broadcasted_iota(jnp.int32, (1, rows), 1) >> (problem.group.bit_length() - 1)
    is_member = lax.shift_right_logical(jnp.full((1, rows), entry.members, jnp.int32), query) & 1
    bound = jnp.minimum(limit - entry.begin.astype(jnp.float32), entry.keys.astype(jnp.float32))
    bound = jnp.where(is_member == 1, bound, 0)
    key = lax.broadcasted_iota(jnp.int32, (problem.keys, rows), 0).astype(jnp.float32)
    return key < bound


def weights_of(s: jax.Array, visible: jax.Array, of: Rows) -> jax.Array:
    """p = exp(s − lse)·correction of logits [keys, rows]; 0 where not visible."""
    return jnp.where(visible, jnp.exp(s - of.lse) * of.correction, 0)


def logits(keys: jax.Array, q: jax.Array, problem: Problem) -> jax.Array:
    """scale · k·q, [keys, rows]."""
    return contract(keys, q, (1, 1)) * problem.scale
