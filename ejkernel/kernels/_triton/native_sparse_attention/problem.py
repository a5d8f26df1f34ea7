"""What a call of native_sparse_attention is to its kernels: its shapes, and its lists turned into work.

Blocks are numbered over the whole array, sequence after sequence: a slot is a block with a first token. A tile of
queries has the union of the slots of its queries, each with a bit for every query that has it in its list; the gradient
of keys has for each slot the queries that list it, in order, cut into items of a bounded length.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.xla_utils.sequence_blocks import places

from .configs import padded_group, power_of_two, queries_of

NONE = np.int32(np.iinfo(np.int32).max)
ITEM = 512
"""Queries of a slot that one program adds up for the gradient of its keys."""


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        B, S, K, H, G, D, V: batch, queries, keys, query heads, key/value heads, features of keys and of values.
        size: keys of a block.
        scale: the factor of q·k.
        entries: slots of a tile's union, at the most.
        slots: blocks of all sequences, at the most.
    """

    B: int
    S: int
    K: int
    H: int
    G: int
    D: int
    V: int
    size: int
    scale: float
    entries: int
    slots: int

    @property
    def heads(self) -> int:
        """Query heads that share a key/value head."""
        return self.H // self.G

    @property
    def PADDED(self) -> int:
        """Rows of a tile for one query."""
        return padded_group(self.heads)

    @property
    def WIDTH(self) -> int:
        return power_of_two(self.D)

    @property
    def V_WIDTH(self) -> int:
        return power_of_two(self.V)


def problem_of(x: Operands, spec: NativeSparseAttentionSpec, rows: int) -> Problem:
    """The problem that a call poses with tiles of so many rows."""
    (B, S, H, D), (_, K, G, V), n = x.q.shape, x.v.shape, x.block_indices.shape[3]
    sequences = 1 if x.cu_seqlens is None else x.cu_seqlens.shape[1] - 1
    slots = -(-K // spec.block_size) if x.cu_seqlens is None else K // spec.block_size + sequences
    entries = queries_of(rows, H // G) * n
    return Problem(B, S, K, H, G, D, V, spec.block_size, spec.softmax_scale, entries, slots)


class Lists(NamedTuple):
    """The lists of a call by slots.

    slots: [b,s,g,n] int32, which slots a query sees, each once; NONE for the rest.
    first: [b,slots] int32, the first token of each slot.
    limit: [b,s] int32: a query sees the tokens before it.
    """

    slots: Array
    first: Array
    limit: Array


def lists_of(x: Operands, problem: Problem) -> Lists:
    """Of each batch element, whose cu_seqlens may be its own."""
    if x.cu_seqlens is None:
        of_one = lambda blocks: _lists_of_one(blocks, None, problem)
        return jax.vmap(of_one)(x.block_indices)
    cuts = jnp.broadcast_to(x.cu_seqlens, (problem.B, x.cu_seqlens.shape[1]))
    return jax.vmap(lambda blocks, cuts: _lists_of_one(blocks, cuts, problem))(x.block_indices, cuts)


def _lists_of_one(blocks: Array, cuts: Array | None, problem: Problem) -> Lists:
    place, size, n = places(cuts, problem.S, problem.K), problem.size, blocks.shape[2]
    slot = jnp.arange(problem.slots, dtype=jnp.int32)
    if cuts is None:
        before, first = jnp.zeros((problem.S,), jnp.int32), slot * size
    else:
        cuts = jnp.clip(cuts, 0, problem.K)
        after = jnp.cumsum(-(-(cuts[1:] - cuts[:-1]) // size), dtype=jnp.int32)
        all_before = jnp.pad(after, (1, 0))
        before = all_before[place.sequence]
        owner = jnp.minimum(jnp.searchsorted(after, slot, side="right").astype(jnp.int32), after.shape[0] - 1)
        first = cuts[owner] + (slot - all_before[owner]) * size
    visible = (blocks >= 0) & (blocks < (-(-place.stop // size))[:, None, None])
    earlier = jnp.asarray(np.tri(n, k=-1, dtype=bool))
    again = ((blocks[..., :, None] == blocks[..., None, :]) & earlier).any(-1)
    slots = jnp.where(visible & ~again, blocks + before[:, None, None], NONE)
    return Lists(slots, first, place.first + place.stop)


def tokens_in_slots(cuts: Array, problem: Problem) -> Array:
    """[t]: where each token stands among all places of all slots, slots · size where it is in none."""
    place, cuts = places(cuts, problem.K, problem.K), jnp.clip(cuts, 0, problem.K)
    before = jnp.pad(jnp.cumsum(-(-(cuts[1:] - cuts[:-1]) // problem.size), dtype=jnp.int32), (1, 0))
    at = before[place.sequence] * problem.size + place.stop - 1
    return jnp.where(place.stop > 0, at, problem.slots * problem.size)


class Unions(NamedTuple):
    """The slots of the queries of each tile, in order.

    count: [b,tiles,g] int32: how many there are.
    begin, end: [b,tiles,g,entries] int32: the tokens of each that some query of the tile sees.
    members: [b,tiles,g,entries] int32: bit i is set where the list of query i of the tile has it.
    """

    count: Array
    begin: Array
    end: Array
    members: Array


def unions_of(lists: Lists, problem: Problem, rows: int) -> Unions:
    """The unions of tiles of so many rows."""
    queries = queries_of(rows, problem.heads)
    tiles = -(-problem.S // queries)
    (b, _, g, n), behind = lists.slots.shape, tiles * queries - problem.S
    slots = jnp.pad(lists.slots, ((0, 0), (0, behind), (0, 0), (0, 0)), constant_values=NONE)
    limit = jnp.pad(lists.limit, ((0, 0), (0, behind)))
    of_tile = lambda a: jnp.moveaxis(a.reshape(b, tiles, queries, g, n), 3, 2).reshape(b, tiles, g, queries * n)
    slots = of_tile(slots)
    query = jnp.broadcast_to(jnp.repeat(jnp.arange(queries, dtype=jnp.int32), n), slots.shape)
    slots, query = lax.sort((slots, query), num_keys=1)
    same = slots[..., :, None] == slots[..., None, :]
    members = jnp.where(same, (jnp.int32(1) << query)[..., None, :], 0).sum(-1, dtype=jnp.int32)
    seen_until = jnp.take_along_axis(limit.reshape(b, tiles, 1, queries), query, axis=-1)
    limits = jnp.where(same, seen_until[..., None, :], 0).max(-1)
    repeated = jnp.pad(slots[..., 1:] == slots[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    slots, members, limits = lax.sort((jnp.where(repeated, NONE, slots), members, limits), num_keys=1)
    begin = jax.vmap(lambda first, at: first[at])(lists.first, jnp.minimum(slots, problem.slots - 1))
    count = (slots != NONE).sum(-1, dtype=jnp.int32)
    return Unions(count, begin, jnp.minimum(begin + problem.size, limits), members)


class Items(NamedTuple):
    """The queries of each slot, cut into items.

    query: [b,g,s·n] int32: the queries of all slots, slot after slot.
    slot: [b,g,items] int32: the slot of each item; the number of all slots where there is none.
    begin, end: [b,g,items] int32: its part of `query`.
    first: [b,g,slots + 1] int32: the first item of each slot.
    """

    query: Array
    slot: Array
    begin: Array
    end: Array
    first: Array


def items_of(lists: Lists, problem: Problem) -> Items:
    """Of each batch element and group, [b,g,…]."""
    b, s, g, n = lists.slots.shape
    by_group = jnp.moveaxis(lists.slots, 2, 1).reshape(b, g, s * n)
    query = jnp.broadcast_to(jnp.repeat(jnp.arange(s, dtype=jnp.int32), n), by_group.shape)
    slots, query = lax.sort((by_group, query), num_keys=1, is_stable=True)
    number = jnp.arange(problem.slots + 1, dtype=jnp.int32)
    of_one = lambda of, at: jnp.searchsorted(of, at).astype(jnp.int32)
    search = jax.vmap(jax.vmap(of_one, (0, None)), (0, None))
    starts = search(slots, number)  # of the slots in `query`
    needed = -(-(starts[..., 1:] - starts[..., :-1]) // ITEM)
    first = jnp.pad(jnp.cumsum(needed, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    count = problem.slots + s * n // ITEM
    item = jnp.arange(count, dtype=jnp.int32)
    slot = search(first[..., 1:], item + 1)  # the first slot whose items end behind it
    of = jnp.minimum(slot, problem.slots - 1)
    take = lambda a, at: jnp.take_along_axis(a, at, axis=-1)
    begin = take(starts, of) + (item - take(first, of)) * ITEM
    end = jnp.where(slot < problem.slots, jnp.minimum(begin + ITEM, take(starts, of + 1)), begin)
    return Items(query, slot, begin, end, first)
