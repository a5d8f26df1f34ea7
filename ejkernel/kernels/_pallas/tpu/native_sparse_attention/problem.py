"""The layout of a call of native_sparse_attention on TPU: tiles of queries, slots of keys, and which tiles list which.

A tile [rows, features] has some neighbouring queries with the heads of one group, query by query. A slot
[keys, features] is a block of keys, padded to whole registers. Logits have keys in sublanes and rows of a tile in
lanes: statistics of rows are lane vectors, and values per slot are scalars.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._native_sparse import NONE, Lists, lists_of, slots_of, tokens_in_slots, unions_of
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.types import KernelConfig

from .configs import at_once, padded_group, padded_size, queries_of


@dataclass(frozen=True)
class Problem:
    """The constants of the kernels of a call.

    Attributes:
        batch, queries, heads, kv_heads: sizes of the call.
        group: rows of a tile for one query.
        rows: rows of a tile.
        tiles: tiles of one batch element and group.
        size: keys of a block.
        keys: keys of a slot: those of its block, and padding.
        slots: slots of one batch element and group.
        blocks: slots whose logits with a tile are computed at once.
        row_blocks: tiles whose logits with a slot are computed at once.
        scale: the factor of q·k.
        is_exact: gradients divide weights by their sum, which makes no difference in 16 bits.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    group: int
    rows: int
    tiles: int
    size: int
    keys: int
    slots: int
    blocks: int
    row_blocks: int
    scale: float
    is_exact: bool


def problem_of(x: Operands, spec: NativeSparseAttentionSpec, config: KernelConfig) -> Problem:
    """The `Problem` of a call with a config."""
    (b, s, h, _), g, queries = x.q.shape, x.k.shape[2], queries_of(config.block_q, x)
    group, keys = padded_group(x), padded_size(x, spec)
    return Problem(
        b, s, h, g, group, queries * group, -(-s // queries), spec.block_size, keys, slots_of(x, spec.block_size),
        at_once(config, keys), at_once(config, queries * group), spec.softmax_scale, x.q.dtype == jnp.float32,
    )  # fmt: skip


# --- Arrays by tiles and by slots -------------------------------------------------------------------------------------


def in_tiles(x: Array, problem: Problem) -> Array:
    """[b,s,h,f] → [b·g·tiles, rows, f], padded with zeros."""
    b, s, h, f = x.shape
    queries, of_group = problem.rows // problem.group, h // problem.kv_heads
    x = jnp.pad(x, ((0, 0), (0, problem.tiles * queries - s), (0, 0), (0, 0)))
    x = x.reshape(b, problem.tiles, queries, problem.kv_heads, of_group, f)
    x = jnp.pad(x, (*((0, 0),) * 4, (0, problem.group - of_group), (0, 0)))
    return jnp.moveaxis(x, 3, 1).reshape(-1, problem.rows, f)


def out_of_tiles(x: Array, problem: Problem) -> Array:
    """[b·g·tiles, rows, f] → [b,s,h,f]."""
    b, g, queries = problem.batch, problem.kv_heads, problem.rows // problem.group
    x = x.reshape(b, g, problem.tiles, queries, problem.group, x.shape[2])[..., : problem.heads // g, :]
    return jnp.moveaxis(x, 1, 3).reshape(b, problem.tiles * queries, problem.heads, -1)[:, : problem.queries]


def rows_in_tiles(x: Array, problem: Problem) -> Array:
    """[b,h,s] → [b·g·tiles, 1, rows]."""
    return in_tiles(x.swapaxes(1, 2)[..., None], problem).swapaxes(1, 2)


def rows_out_of_tiles(x: Array, problem: Problem) -> Array:
    """[b·g·tiles, 1, rows] → [b,h,s]."""
    return out_of_tiles(x.swapaxes(1, 2), problem)[..., 0].swapaxes(1, 2)


def in_slots(x: Array, of: Operands, problem: Problem) -> Array:
    """[b,t,g,f] → [b·g·slots, keys, f], padded with zeros."""
    (b, t, g, f), places = x.shape, problem.slots * problem.size
    if of.cu_seqlens is None:
        x = jnp.pad(x, ((0, 0), (0, places - t), (0, 0), (0, 0)))
    else:
        at = tokens_in_slots(of, problem.size)
        x = jnp.zeros((b, places, g, f), x.dtype).at[jnp.arange(b)[:, None], at].set(x, mode="drop")
    x = jnp.moveaxis(x.reshape(b, problem.slots, problem.size, g, f), 3, 1)
    return jnp.pad(x, (*((0, 0),) * 3, (0, problem.keys - problem.size), (0, 0))).reshape(-1, problem.keys, f)


def out_of_slots(x: Array, of: Operands, problem: Problem) -> Array:
    """[b·g·slots, keys, f] → [b,t,g,f]; 0 for tokens of no slot."""
    b, g, t = problem.batch, problem.kv_heads, of.k.shape[1]
    x = x.reshape(b, g, problem.slots, problem.keys, x.shape[2])[..., : problem.size, :]
    x = jnp.moveaxis(x, 1, 3).reshape(b, problem.slots * problem.size, g, -1)
    if of.cu_seqlens is None:
        return x[:, :t]
    at = tokens_in_slots(of, problem.size)
    return x.at[jnp.arange(b)[:, None], at].get(mode="fill", fill_value=0)


# --- Which tiles list which slots -------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The slots that the tiles of a call list.

    Attributes:
        count: [b·g·tiles] int32, the number of slots of each tile.
        slot, members, begin, keys: [b·g·tiles · entries] int32, tile by tile: for each entry the number of the slot
            among all, the queries of the tile that list it as bits, its first token, and how many of its keys any of
            these queries sees; all 0 for an unused entry.
        first: [b·g·slots] int32, the first token of each slot.
        limit: [b·g·tiles, 1, rows] float32: a row sees the tokens before this position.
        sees: [b,s,h] bool: whether a query sees any key; a fully masked one may hold NaN.
    """

    count: Array
    slot: Array
    members: Array
    begin: Array
    keys: Array
    first: Array
    limit: Array
    sees: Array


def pairs_of(x: Operands, problem: Problem) -> Pairs:
    """The `Pairs` of the operands of a call."""
    lists = lists_of(x, problem.size)
    unions = unions_of(lists, problem.rows // problem.group, problem.size)
    by_group = lambda a: jnp.moveaxis(a, 2, 1)
    there = by_group(unions.slots) != NONE
    of_group = jnp.arange(problem.batch * problem.kv_heads, dtype=jnp.int32).reshape(problem.batch, -1, 1, 1)
    flat = lambda a: jnp.where(there, a, 0).reshape(-1)
    return Pairs(
        unions.count.swapaxes(1, 2).reshape(-1),
        flat(by_group(unions.slots) + of_group * problem.slots),
        flat(by_group(unions.members)),
        flat(by_group(unions.begin)),
        flat(by_group(unions.end - unions.begin)),
        jnp.repeat(lists.first, problem.kv_heads, axis=0).reshape(-1),
        _limit(lists, problem),
        jnp.repeat((lists.slots != NONE).any(-1), problem.heads // problem.kv_heads, axis=2),
    )


def _limit(lists: Lists, problem: Problem) -> Array:
    limit = jnp.broadcast_to(lists.limit[:, None], (problem.batch, problem.heads, problem.queries))
    return rows_in_tiles(limit.astype(jnp.float32), problem)


def by_slots(pairs: Pairs, problem: Problem) -> tuple[Array, Array, list[Array]]:
    """The pairs sorted by slots: the first pair and the number of pairs of each slot, and the fields of all pairs.

    The fields are those of an `Entry` whose minor block is the tile, and whose keys are all keys of the slot.
    """
    entries = pairs.slot.shape[0] // pairs.count.shape[0]
    tile = jnp.repeat(jnp.arange(pairs.count.shape[0], dtype=jnp.int32), entries)
    (slots,), slot = pairs.first.shape, jnp.where(pairs.keys > 0, pairs.slot, np.int32(pairs.first.shape[0]))
    slot, tile, members = lax.sort((slot, tile, pairs.members), num_keys=2, is_stable=False)
    starts = jnp.searchsorted(slot, jnp.arange(slots + 1, dtype=jnp.int32)).astype(jnp.int32)
    begin = pairs.first[jnp.minimum(slot, slots - 1)]
    return starts[:-1], starts[1:] - starts[:-1], [tile, members, begin, jnp.full_like(tile, problem.size)]
