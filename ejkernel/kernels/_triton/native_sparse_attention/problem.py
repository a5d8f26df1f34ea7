"""The compile-time constants of the kernels of native_sparse_attention, and the work items of its gradient of keys.

The lists of queries and the unions of tiles are from `kernels/_native_sparse.py`. For the gradient of keys, the queries
that list a slot, in order, are cut into items of a bounded length.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.kernels._native_sparse import Lists, slots_of
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands
from ejkernel.xla_utils.search import entries_before

from .configs import padded_group, power_of_two, queries_of

ITEM = 512
"""The most queries of a work item of the gradient of keys."""


@dataclass(frozen=True)
class Problem:
    """The shapes of one call, as a compile-time constant.

    Attributes:
        B, S, K, H, G, D, V: batch, queries, keys, query heads, key/value heads, features of keys and of values.
        size: keys of a block.
        scale: the factor of q·k.
        entries: the most slots that the union of a tile can have.
        slots: the most blocks that all sequences can have.
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
        """The rows of one query in a tile: its heads, padded to a power of two."""
        return padded_group(self.heads)

    @property
    def WIDTH(self) -> int:
        return power_of_two(self.D)

    @property
    def V_WIDTH(self) -> int:
        return power_of_two(self.V)


def problem_of(x: Operands, spec: NativeSparseAttentionSpec, rows: int) -> Problem:
    """The `Problem` of a call with tiles of `rows` rows."""
    (B, S, H, D), (_, K, G, V), n = x.q.shape, x.v.shape, x.block_indices.shape[3]
    entries, slots = queries_of(rows, H // G) * n, slots_of(x, spec.block_size)
    return Problem(B, S, K, H, G, D, V, spec.block_size, spec.softmax_scale, entries, slots)


class Items(NamedTuple):
    """The queries that list each slot, cut into work items.

    query: [b,g,s·n] int32: the queries of all slots, slot after slot.
    slot: [b,g,items] int32: the slot of each item; the number of slots for an unused item.
    begin, end: [b,g,items] int32: the range of `query` of each item.
    first: [b,g,slots + 1] int32: the first item of each slot.
    """

    query: Array
    slot: Array
    begin: Array
    end: Array
    first: Array


def items_of(lists: Lists, problem: Problem) -> Items:
    """The work items of each batch element and group, [b,g,…]."""
    entries = lists.slots.shape[1] * lists.slots.shape[3]
    slots, query = _by_slot(jnp.moveaxis(lists.slots, 2, 1), problem)
    number = jnp.arange(problem.slots + 1, dtype=jnp.int32)
    search = jax.vmap(jax.vmap(entries_before, (0, None)), (0, None))
    starts = search(slots, number)  # where each slot begins in `query`
    needed = -(-(starts[..., 1:] - starts[..., :-1]) // ITEM)
    first = jnp.pad(jnp.cumsum(needed, axis=-1, dtype=jnp.int32), ((0, 0), (0, 0), (1, 0)))
    count = problem.slots + entries // ITEM
    item = jnp.arange(count, dtype=jnp.int32)
    slot = search(first[..., 1:], item + 1)  # the first slot whose items end after this one
    of = jnp.minimum(slot, problem.slots - 1)
    take = lambda a, at: jnp.take_along_axis(a, at, axis=-1)
    begin = take(starts, of) + (item[None, None] - take(first, of)) * ITEM
    end = jnp.where(slot < problem.slots, jnp.minimum(begin + ITEM, take(starts, of + 1)), begin)
    return Items(query, slot, begin, end, first)


def _by_slot(slots: Array, problem: Problem) -> tuple[Array, Array]:
    """The slots [b,g,s·n] of lists [b,g,s,n] in ascending order, and the query of each; equal slots by their queries.

    Where they fit into 32 bits, group, slot and query are one number: XLA sorts such an array without others, in one
    dimension and in any order of equal ones, by radix sort on NVIDIA GPUs.
    """
    (b, g, s, n), values = slots.shape, problem.slots + 1
    group = jnp.arange(b * g, dtype=jnp.uint32).reshape(b, g, 1, 1)
    of_all = group * values + jnp.minimum(slots, problem.slots).astype(jnp.uint32)
    query = jnp.broadcast_to(jnp.arange(s, dtype=jnp.uint32)[:, None], slots.shape)
    bits = max(1, (s - 1).bit_length())
    if (b * g * values) << bits <= 2**32:
        key = lax.sort(((of_all << bits) | query).reshape(-1), is_stable=False)
        of_all, query = key >> bits, key & (2**bits - 1)
    else:
        of_all, query = lax.sort((of_all.reshape(-1), query.reshape(-1)), num_keys=2, is_stable=False)
    found = (of_all.reshape(b, g, s * n) - group[..., 0] * values).astype(jnp.int32)
    return found, query.reshape(b, g, s * n).astype(jnp.int32)
