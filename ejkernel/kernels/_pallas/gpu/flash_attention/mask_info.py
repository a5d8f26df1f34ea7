"""The mask of packed sequences, segment ids and block masks, in the form in which the kernels read it.

A kernel keeps tiles of queries (or of keys) stationary and streams blocks of the others: rows belong to the stationary
side, columns to the streamed one. In a packed call a row sees one interval of columns, causality and window included.
In a call with segments it sees the columns with its id that are inside the band of causality and window. With a block
mask each tile has a list of its blocks, the full ones first.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._visibility import BlockRanges, Visibility, zero_where

from .fully_masked import fully_masked as of_segments
from .hidden_rows import HiddenRows, hidden_rows

# The ids given to padding, different for queries and keys, so that these do not see each other.
PADDING_QUERY, PADDING_KEY = -1, -2


class MaskInfo(NamedTuple):
    """The blocks of each tile and what its rows see, int32.

    block_ranges [b?, h?, tiles, 4]: the `BlockRanges` of each tile. intervals, in packed calls: first and stop, a row
    sees columns from first to before stop. segment_ids: of rows and of columns. Arrays of rows [b, rows] and columns
    [b, columns] go on to the end of the last tile or block. block_lists [b?, h?, tiles, blocks], with a block mask: the
    ranges are of places in these lists, behind whose ends stands the number of a block that is not there.
    hidden_columns, hidden_rows: which the kernels overwrite with zeros in shared memory.
    """

    block_ranges: Array
    intervals: tuple[Array, Array] | None
    segment_ids: tuple[Array, Array] | None
    block_lists: Array | None = None
    hidden_columns: HiddenRows | None = None
    hidden_rows: HiddenRows | None = None

    def block_range(self, tile: Array, batch: Array, head: Array | int = 0) -> BlockRanges:
        """In a kernel, where the arrays are refs: the range of blocks of a tile, or of indices into its list."""
        row = same(self.block_ranges, batch, head)
        return BlockRanges(*(self.block_ranges[*row, tile, n] for n in range(len(BlockRanges._fields))))

    def block(self, n: Array, tile: Array, batch: Array, head: Array) -> Array:
        """In a kernel: block n of a tile's range."""
        return n if self.block_lists is None else self.block_lists[*same(self.block_lists, batch, head), tile, n]


def mask_info_of(visibility: Visibility, block_rows: int, block_columns: int) -> MaskInfo | None:
    """The `MaskInfo` of rows that are queries, or keys if the visibility is transposed; None without arrays."""
    if visibility.cu_seqlens is None and visibility.segment_ids is None:
        return None
    ranges = visibility.block_ranges(block_rows, block_columns).at_least_one(-(-visibility.kv_len // block_columns))
    ranges = jnp.stack(ranges, -1)[:, None]
    if visibility.cu_seqlens is not None:
        return MaskInfo(ranges, tuple(_up_to_blocks(x, block_rows, 0) for x in visibility.intervals()), None)
    rows, columns = visibility.segment_ids
    rows, columns = jnp.where(rows < 0, PADDING_QUERY, rows), jnp.where(columns < 0, PADDING_KEY, columns)
    ids = _up_to_blocks(rows, block_rows, PADDING_QUERY), _up_to_blocks(columns, block_columns, PADDING_KEY)
    return MaskInfo(ranges, None, ids)


def with_hidden_columns(mask_info: MaskInfo, hidden: Array, block_columns: int) -> MaskInfo:
    """The mask with the columns that are hidden [b?,1,columns]."""
    return mask_info._replace(hidden_columns=hidden_rows(hidden, block_columns, mask_info.block_ranges))


def zero_hidden_keys(visibility: Visibility, *arrays: Array | None) -> tuple:
    """Arrays [b, K, G, …] with zeros where no query sees a key. A band that hides keys is none of these kernels'."""
    if visibility.cu_seqlens is None and visibility.segment_ids is None and visibility.mask is None:
        return arrays
    return zero_where(fully_masked(visibility.transposed()), *arrays)


def zero_fully_masked_queries(visibility: Visibility, *arrays: Array) -> tuple:
    """Arrays [b, S, H, …] with zeros where a query sees no key."""
    if visibility.segment_ids is None and visibility.mask is None and not visibility.masks_queries:
        return arrays
    return zero_where(fully_masked(visibility), *arrays)


def fully_masked(visibility: Visibility) -> Array:
    """Whether a query sees no key; with segment ids alone a kernel finds out, where XLA would look at all pairs."""
    if visibility.segment_ids is None or visibility.mask is not None:
        return visibility.fully_masked()
    return of_segments(visibility)


def same(x: Array, batch: Array, head: Array | int) -> tuple[Array | int, Array | int]:
    """The index into x [b?, h?, …], whose axes of size 1 hold for all, of a batch index and a head."""
    return batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0


def _up_to_blocks(x: Array, block: int, padding: int) -> Array:
    """Pads [b, n] to a multiple of `block`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=padding)
