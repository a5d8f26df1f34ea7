"""Zeros in shared memory where rows are fully masked: what TMA copies there may be NaN, and 0·NaN = NaN.

Zeros in device memory would take a copy of the whole array. But hardly any tile has such rows: where one has, the
producer waits for its copies, writes zeros to these rows, and only then lets it count as full.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.rows import zero_chosen_rows
from .._launch import either
from .feature_tiles import Tiles, load_parts


class HiddenRows(NamedTuple):
    """int32, 1 where a row is fully masked, where a block of rows has such a row, where a tile streams such a block.

    rows [b?, n], up to the end of the last block; blocks [b?, blocks]; tiles [b?, tiles], or None.
    """

    rows: Array
    blocks: Array
    tiles: Array | None

    def of_tile(self, batch: Array, tile: Array) -> Array:
        """In a kernel: whether a tile streams a block with hidden rows."""
        return self.tiles[_batch(self.tiles, batch), tile] > 0

    def of_block(self, batch: Array, block: Array) -> Array:
        """In a kernel: whether a block has hidden rows."""
        return self.blocks[_batch(self.blocks, batch), block] > 0

    def of_streamed_block(self, tile_has: Array, batch: Array, block: Array) -> Array:
        """The same, where it is known whether the tile that streams the block has any: if not, nothing is read."""
        read = lambda: self.blocks[_batch(self.blocks, batch), block]
        return lax.cond(tile_has, read, lambda: jnp.int32(0)) > 0


def hidden_rows(masked: Array, block: int, block_ranges: Array | None = None) -> HiddenRows:
    """Of rows [b?,1,n] bool, in blocks of `block`, which tiles with `block_ranges` [b?,1,tiles,4] stream, if given."""
    # int32 from the start: XLA would convert the rows in a kernel of its own.
    rows = jnp.pad(masked[:, 0].astype(jnp.int32), ((0, 0), (0, -masked.shape[2] % block)))
    blocks, tiles = rows.reshape(len(rows), -1, block).max(2), None
    if block_ranges is not None:
        begin, end = (block_ranges[:, 0, :, n, None] for n in range(2))
        number = jnp.arange(blocks.shape[1], dtype=jnp.int32)
        tiles = jnp.where((begin <= number) & (number < end), blocks[:, None], 0).max(2)
    return HiddenRows(rows, blocks, tiles)


def load_visible(
    hidden: Array | None, rows: HiddenRows, batch: Array, first: Array, landed: Any, tiles: Tiles, stage: Any,
    source: Callable[[pl.Slice], Any], features: int, full: Any,
) -> None:  # fmt: skip
    """`load_parts(tiles, stage, source, features, full)` of rows from `first` on, zeros where they are hidden.

    `hidden` says whether any is, None where it cannot be; `landed` is a barrier of the producer by itself.
    """
    load = lambda to: load_parts(tiles, stage, source, features, to)
    if hidden is None:
        return load(full)

    def zeroed():
        load(landed)
        plgpu.barrier_wait(landed)
        for part in tiles.parts:
            zero_chosen_rows(part.at[stage], rows.rows.at[_batch(rows.rows, batch)], first)
        plgpu.commit_smem()
        for _ in tiles.copies:
            plgpu.barrier_arrive(full)

    either(hidden, zeroed, lambda: load(full))


def _batch(x: Any, batch: Array) -> Array | int:
    return batch if x.shape[0] > 1 else 0
