"""For each tile of queries the list of the tiles of keys that it attends to, and for each tile of keys that of queries.

Lists are made on the device when the program runs, since a block mask may be traced. A tile is listed where its block
is kept, and causality, window, sequences and segments leave something of it. Memory is that of the number of tiles.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._block_lists import entries_of, longest_first
from ejkernel.kernels._block_masks import kept_tiles
from ejkernel.kernels._triton.flash_attention import sequence_info
from ejkernel.kernels._triton.flash_attention.problem import broadcast_strides
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands


class Lists(NamedTuple):
    """The lists of N tiles: [b?,h?,N] the tiles in order, those of the longest lists first; [b?,h?,N] the length of
    each one's list; [b?,h?,N,·] the lists, in ascending order, behind whose ends stands a number of no tile.
    """

    order: Array
    counts: Array
    entries: Array

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel has to know of them: the strides of [b?,h?,N], 0 where shared, and the places of a list."""
        return dict(LISTS=broadcast_strides(self.counts), LONGEST=self.entries.shape[3])


def lists_of_keys(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Lists:
    """For each tile of queries those of keys."""
    return _listed(tiles_to_compute(x, spec, tile))


def lists_of_queries(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Lists:
    """For each tile of keys, of a key/value head, those of queries.

    Where the block mask differs between heads, those of all heads of a group are in one list, numbered head by head.
    """
    kept, groups = tiles_to_compute(x, spec, tile), x.k.shape[2]
    b, h, rows, columns = kept.shape
    if h > 1:
        of_groups = jnp.moveaxis(kept.reshape(b, groups, h // groups, rows, columns), 4, 2)
        return _listed(of_groups.reshape(b, groups, columns, -1))
    return _listed(kept.swapaxes(2, 3))


def tiles_to_compute(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Array:
    """Whether a tile has to be computed, bool [b?,h?,rows,columns] of tiles, each of which is within one block."""
    some, _ = visibility_of(x.attention._replace(mask=None), spec).blocks(*tile)
    return kept_tiles(x, spec.block_size, tile) & some[:, None]


def _listed(kept: Array) -> Lists:
    """The lists of the last axis."""
    counts = kept.sum(-1, dtype=jnp.int32)
    return Lists(longest_first(counts), counts, entries_of(kept))


# --- In kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def list_of_program(order, counts, entries, strides: tl.constexpr, LONGEST: tl.constexpr, BLOCKS: tl.constexpr,
                    HEADS: tl.constexpr):  # fmt: skip
    """(tile, head, batch index, length of the list, pointer to the list) of this program; a list has LONGEST places."""
    rank, head, batch = sequence_info.place(BLOCKS, HEADS)
    row = batch * strides.b + head * strides.h
    block = tl.load(order + row + rank)
    return block, head, batch, tl.load(counts + row + block), entries + tl.cast(row + block, tl.int64) * LONGEST


@triton.jit
def entry(entries, n, count):
    """Entry n of a list, or the last one: it is read a step ahead, so that no load waits for its address."""
    return tl.load(entries + tl.minimum(n, count - 1))
