"""Lists of the tiles of keys for each tile of queries, and of the tiles of queries for each tile of keys.

Lists are made on the device when the program runs, since a block mask may be traced. A tile is listed if its block is
kept and causality, window, sequences and segments leave any pair of it visible. Memory grows with the number of tiles.
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
    """The lists of N stationary tiles.

    order: [b?,h?,N] the tiles, those with the longest lists first.
    counts: [b?,h?,N] the length of each tile's list.
    entries: [b?,h?,N,·] the lists in ascending order, padded with a number that is no tile's.
    """

    order: Array
    counts: Array
    entries: Array

    @property
    def constants(self) -> dict[str, Any]:
        """The constants for a kernel: the strides of [b?,h?,N], 0 along shared axes, and the allocated list length."""
        return dict(LISTS=broadcast_strides(self.counts), LONGEST=self.entries.shape[3])


def lists_of_keys(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Lists:
    """The lists of tiles of keys for each tile of queries."""
    return _listed(tiles_to_compute(x, spec, tile))


def lists_of_queries(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Lists:
    """The lists of tiles of queries for each tile of keys of each key/value head.

    If the block mask differs between heads, one list has the tiles of all heads of a group, numbered head by head.
    """
    kept, groups = tiles_to_compute(x, spec, tile), x.k.shape[2]
    b, h, rows, columns = kept.shape
    if h > 1:
        of_groups = jnp.moveaxis(kept.reshape(b, groups, h // groups, rows, columns), 4, 2)
        return _listed(of_groups.reshape(b, groups, columns, -1))
    return _listed(kept.swapaxes(2, 3))


def tiles_to_compute(x: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> Array:
    """Which tiles have to be computed, bool [b?,h?,rows,columns]; each tile lies within one block."""
    some, _ = visibility_of(x.attention._replace(mask=None), spec).blocks(*tile)
    return kept_tiles(x, spec.block_size, tile) & some[:, None]


def _listed(kept: Array) -> Lists:
    """For each row of tiles, the list of those kept along the last axis."""
    counts = kept.sum(-1, dtype=jnp.int32)
    return Lists(longest_first(counts), counts, entries_of(kept))


# --- In kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def list_of_program(order, counts, entries, strides: tl.constexpr, LONGEST: tl.constexpr, BLOCKS: tl.constexpr,
                    HEADS: tl.constexpr):  # fmt: skip
    """The tile, head and batch index of this program, and the length of and pointer to its list of LONGEST entries."""
    rank, head, batch = sequence_info.place(BLOCKS, HEADS)
    row = batch * strides.b + head * strides.h
    block = tl.load(order + row + rank)
    return block, head, batch, tl.load(counts + row + block), entries + tl.cast(row + block, tl.int64) * LONGEST


@triton.jit
def entry(entries, n, count):
    """Entry n of a list, or its last one: entries are read a step ahead, so that no load waits for its address."""
    return tl.load(entries + tl.minimum(n, count - 1))
