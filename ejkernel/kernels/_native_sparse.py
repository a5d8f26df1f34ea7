"""The lists of blocks of native_sparse_attention in the form that the kernels of all platforms take.

Blocks are numbered over the whole array, sequence after sequence; a numbered block is called a slot. For a tile of
queries the kernels take the union of the queries' slots, with a bit in each slot for every query that lists it.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.native_sparse_attention import Operands
from ejkernel.xla_utils.search import entries_until
from ejkernel.xla_utils.sequence_blocks import places

NONE = np.int32(2**31 - 1)
"""The number of no slot, which sorts after all others."""


def slots_of(x: Operands, size: int) -> int:
    """An upper bound of the number of blocks of all sequences."""
    keys = x.k.shape[1]
    return -(-keys // size) if x.cu_seqlens is None else keys // size + x.cu_seqlens.shape[1] - 1


class Lists(NamedTuple):
    """The lists of a call by slots.

    slots: [b,s,g,n] int32, which slots a query sees, each once; NONE for the rest.
    first: [b,slots] int32, the first token of each slot.
    limit: [b,s] int32: a query sees the tokens before it.
    """

    slots: Array
    first: Array
    limit: Array


def lists_of(x: Operands, size: int) -> Lists:
    """The lists of a call, of each batch element by its own cu_seqlens."""
    of_one = partial(_lists_of_one, keys=x.k.shape[1], slots=slots_of(x, size), size=size)
    if x.cu_seqlens is None:
        return jax.vmap(lambda blocks: of_one(blocks, None))(x.block_indices)
    cuts = jnp.broadcast_to(x.cu_seqlens, (x.q.shape[0], x.cu_seqlens.shape[1]))
    return jax.vmap(of_one)(x.block_indices, cuts)


def _lists_of_one(blocks: Array, cuts: Array | None, *, keys: int, slots: int, size: int) -> Lists:
    queries, slot = blocks.shape[0], jnp.arange(slots, dtype=jnp.int32)
    place = places(cuts, queries, keys)
    if cuts is None:
        before, first = jnp.zeros((queries,), jnp.int32), slot * size
    else:
        cuts = jnp.clip(cuts, 0, keys)
        after = jnp.cumsum(-(-(cuts[1:] - cuts[:-1]) // size), dtype=jnp.int32)
        all_before = jnp.pad(after, (1, 0))
        before = all_before[place.sequence]
        owner = jnp.minimum(entries_until(after, slot), after.shape[0] - 1)
        first = cuts[owner] + (slot - all_before[owner]) * size
    visible = (blocks >= 0) & (blocks < (-(-place.stop // size))[:, None, None])
    found = jnp.where(visible & ~listed_before(blocks), blocks + before[:, None, None], NONE)
    return Lists(found, first, place.first + place.stop)


def listed_before(blocks: Array) -> Array:
    """Which entries of lists [..., n] stand earlier in their list too."""
    earlier = jnp.asarray(np.tri(blocks.shape[-1], k=-1, dtype=bool))
    return ((blocks[..., :, None] == blocks[..., None, :]) & earlier).any(-1)


def tokens_in_slots(x: Operands, size: int) -> Array:
    """For cu_seqlens the index [b,t] of each token among the tokens of all slots; past the end for tokens in none."""
    keys, behind = x.k.shape[1], slots_of(x, size) * size

    def of_one(cuts: Array) -> Array:
        place, cuts = places(cuts, keys, keys), jnp.clip(cuts, 0, keys)
        before = jnp.pad(jnp.cumsum(-(-(cuts[1:] - cuts[:-1]) // size), dtype=jnp.int32), (1, 0))
        return jnp.where(place.stop > 0, before[place.sequence] * size + place.stop - 1, behind)

    return jax.vmap(of_one)(jnp.broadcast_to(x.cu_seqlens, (x.q.shape[0], x.cu_seqlens.shape[1])))


class Unions(NamedTuple):
    """The slots of the queries of each tile, in order.

    count: [b,tiles,g] int32: how many there are.
    begin, end: [b,tiles,g,entries] int32: the tokens of each that some query of the tile sees.
    members: [b,tiles,g,entries] int32: bit i is set where the list of query i of the tile has it.
    slots: [b,tiles,g,entries] int32: their numbers; NONE for the rest.
    """

    count: Array
    begin: Array
    end: Array
    members: Array
    slots: Array


def unions_of(lists: Lists, queries: int, size: int) -> Unions:
    """The unions for tiles of `queries` queries, of slots with `size` tokens."""
    (b, s, g, n), slots = lists.slots.shape, lists.first.shape[1]
    tiles = -(-s // queries)
    behind = tiles * queries - s
    found = jnp.pad(lists.slots, ((0, 0), (0, behind), (0, 0), (0, 0)), constant_values=NONE)
    limit = jnp.pad(lists.limit, ((0, 0), (0, behind)))
    of_tile = lambda a: jnp.moveaxis(a.reshape(b, tiles, queries, g, n), 3, 2).reshape(b, tiles, g, queries * n)
    found = of_tile(found)
    query = jnp.broadcast_to(jnp.repeat(jnp.arange(queries, dtype=jnp.int32), n), found.shape)
    found, query = lax.sort((found, query), num_keys=2, is_stable=False)  # no two are equal, but for those of no slot
    same = found[..., :, None] == found[..., None, :]
    members = jnp.where(same, (jnp.int32(1) << query)[..., None, :], 0).sum(-1, dtype=jnp.int32)
    seen_until = jnp.take_along_axis(limit.reshape(b, tiles, 1, queries), query, axis=-1)
    limits = jnp.where(same, seen_until[..., None, :], 0).max(-1)
    repeated = jnp.pad(found[..., 1:] == found[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    found = jnp.where(repeated, NONE, found)
    found, members, limits = lax.sort((found, members, limits), num_keys=1, is_stable=False)
    begin = jax.vmap(lambda first, at: first[at])(lists.first, jnp.minimum(found, slots - 1))
    count = (found != NONE).sum(-1, dtype=jnp.int32)
    return Unions(count, begin, jnp.minimum(begin + size, limits), members, found)
