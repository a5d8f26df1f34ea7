"""The unions of the lists of the queries of each tile, in one launch.

A program sorts the entries of a tile by slot and query, so that the queries of a slot are a run. The last of a run has
the members of all of them by a segmented scan, and its place is the number of runs that end before it. By XLA that is
two sorts and a comparison of all pairs.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels import _native_sparse
from ejkernel.kernels._native_sparse import Lists, Unions
from ejkernel.kernels._triton import _launch
from ejkernel.types import KernelConfig

# Entries of a warp: 8 for each thread. Up to so many a program is one warp, which sorts without barriers.
OF_WARP = 256
# Entries of a program at most: with more, many registers spill, and Triton takes half a minute to compile the sort.
MOST_ENTRIES = 2048
_LARGEST = 2**31 - 1


def unions_of(lists: Lists, queries: int, size: int) -> Unions:
    """The unions for tiles of `queries` queries, of slots with `size` tokens.

    As `_native_sparse.unions_of`, which makes those of longer lists, but for the entries from `count` on: they are not
    written and may hold anything.
    """
    (b, s, g, n), slots = lists.slots.shape, lists.first.shape[1]
    tiles, width = triton.cdiv(s, queries), triton.next_power_of_2(queries * n)
    if width > MOST_ENTRIES:
        return _native_sparse.unions_of(lists, queries, size)
    rows, warps = max(1, OF_WARP // width), max(1, width // OF_WARP)
    bits = ((width - 1) // n).bit_length()
    count, entries = (jax.ShapeDtypeStruct((b, tiles, g, *of), jnp.int32) for of in ((), (queries * n,)))
    return _launch.launch(
        unions_kernel, *lists,
        out_type=Unions(count, entries, entries, entries, entries),
        grid=triton.cdiv(b * tiles * g, rows),
        config=KernelConfig(num_warps=warps, num_stages=1),
        B=b, S=s, G=g, n=n, queries=queries, size=size, slots=slots,
        ROWS=rows, WIDTH=width, BITS=bits, KEY=tl.int32 if (slots + 1) << bits <= _LARGEST else tl.int64,
    )  # fmt: skip


@triton.jit
def unions_kernel(
    listed, first, limit,
    count, begin, end, members, union,
    B: tl.constexpr, S: tl.constexpr, G: tl.constexpr, n: tl.constexpr,
    queries: tl.constexpr, size: tl.constexpr, slots: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, KEY: tl.constexpr,
):  # fmt: skip
    """A program has some rows of [b,tiles,g]; a key is a slot, or `slots` for none, and then the query in BITS bits."""
    TILES: tl.constexpr = (S + queries - 1) // queries
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    batch, tile, group = row // (TILES * G), row // G % TILES * queries, row % G
    token = batch.to(tl.int64) * S + tile
    entry = tl.arange(0, WIDTH)[None, :]
    query = entry // n
    inside = (row < B * TILES * G)[:, None] & (query < tl.minimum(queries, S - tile)[:, None])
    of_row = listed + (token * G + group)[:, None] * n
    slot = tl.minimum(tl.load(of_row + (query * (G * n) + entry % n), mask=inside, other=slots), slots)
    key = tl.sort((slot.to(KEY) << BITS) | query, 1)
    slot, query = (key >> BITS).to(tl.int32), (key & ((1 << BITS) - 1)).to(tl.int32)
    following = tl.gather(slot, tl.broadcast_to(tl.minimum(entry + 1, WIDTH - 1), [ROWS, WIDTH]), 1)
    last = (slot < slots) & ((slot != following) | (entry == WIDTH - 1))
    _, together = tl.associative_scan((slot, 1 << query), 1, joined)
    ends = tl.cumsum(last.to(tl.int32), 1)
    start = tl.load((first + batch.to(tl.int64) * slots)[:, None] + slot, mask=last)
    # The queries that list a slot are of one sequence, of which the last one sees the most.
    stop = tl.load((limit + token)[:, None] + query, mask=last)
    place = (row.to(tl.int64) * (queries * n))[:, None] + (ends - 1)
    tl.store(begin + place, start, mask=last)
    tl.store(end + place, tl.minimum(start + size, stop), mask=last)
    tl.store(members + place, together, mask=last)
    tl.store(union + place, slot, mask=last)
    tl.store(count + row, tl.sum(last.to(tl.int32), 1), mask=row < B * TILES * G)


@triton.jit
def joined(slot, members, next_slot, next_members):
    """The slot that two neighbouring ranges of entries end with, and its members so far."""
    return next_slot, tl.where(slot == next_slot, members, 0) | next_members
