"""Tile schedulers: which work tile, a block of queries of one head, a thread block computes, and in which order.

The work tiles in flight should be of few heads: then the keys and values of these come from device memory once, and
from the L2 cache to all tiles that see them. 132 tiles of as many heads, at 16k tokens, would want 7 TB/s of an H100.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._block_lists import longest_first

# Bytes of keys and values that the L2 cache holds beside q and o (50 MB, parts of which hold the same data for either
# half of the device).
L2_BYTES = 24 << 20
# Work tiles of a thread block, at least, that are not paired: scheduled longest first, they even out what pairs do not.
UNPAIRED = 4
# The most waves of a launch, and the fewest work tiles of a multiprocessor that are split into waves.
WAVES = 5
LEAST_TILES_OF_WAVES = 16
# The cost of a work tile that does not depend on its keys, in units of the keys that the next tile of its head sees
# more.
TILE_OVERHEAD = 0.5


@dataclass(frozen=True)
class PersistentTileScheduler:
    """A thread block for each multiprocessor, which computes work tiles one after the other, head after head.

    Where later tiles of a head see more keys, a thread block computes the last and the first tile of a head one after
    the other, or the last but one and the second …: all such pairs cost the same. The tiles of the last heads, which
    are left when all thread blocks have had the same number of pairs, are assigned by a table that is made before the
    kernel runs: longest first, each to the thread block with the least work.

    A long launch is several waves: the tiles of a multiprocessor are split over thread blocks, the first of which has
    half of them, the second half of the others, and so on. Thread blocks of another stream, such as NCCL's, can then
    start between two waves, and those of the first wave that wait for the multiprocessors of the others are behind by
    half of the launch at most, which later waves even out. In one wave they double its time.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        later_tiles_are_longer: later tiles of a head see more keys.
        processors: streaming multiprocessors of the device.
        long: whether there may be several waves.
    """

    tiles: int
    heads: int
    later_tiles_are_longer: bool
    processors: int
    long: bool = False

    @property
    def number(self) -> int:
        return self.tiles * self.heads

    @property
    def wave(self) -> int:
        """The thread blocks of a wave."""
        return min(self.number, self.processors)

    @property
    def blocks(self) -> int:
        return self.wave * len(self.begins)

    @property
    def paired(self) -> int:
        """Work tiles of a multiprocessor that are in pairs."""
        last = min(self.heads, -(-UNPAIRED * self.processors // self.tiles))
        return (self.heads - last) * self.tiles // (2 * self.processors) * 2 if self.later_tiles_are_longer else 0

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The first work tile of each wave, of those that a multiprocessor would have in one wave."""
        least = (
            self.paired + int(self.longest_first[:, 0].min())
            if self.later_tiles_are_longer
            else self.number // self.wave
        )
        begins = [0]
        while self.long and least >= LEAST_TILES_OF_WAVES and len(begins) < WAVES and least - begins[-1] >= 4:
            begins.append(begins[-1] + (least - begins[-1]) // 4 * 2)
        return tuple(begins)

    @cached_property
    def longest_first(self) -> np.ndarray | None:
        """For each multiprocessor the number of tiles after its pairs, then these, int32; None if costs are equal."""
        if not self.later_tiles_are_longer:
            return None
        place = np.arange(self.number) % self.tiles
        work = np.where(place % 2 == 0, self.tiles - 1 - place // 2, place // 2) + 1 + TILE_OVERHEAD
        pairs = work[: self.paired * self.wave].reshape(-1, self.wave, 2).sum((0, 2))
        blocks = [(load, block) for block, load in enumerate(pairs.tolist())]
        heapq.heapify(blocks)
        assigned: list[list[int]] = [[] for _ in blocks]
        left = range(self.paired * self.wave, self.number)
        for number in sorted(left, key=lambda n: -work[n]):
            load, block = heapq.heappop(blocks)
            assigned[block].append(number)
            heapq.heappush(blocks, (load + work[number], block))
        table = np.zeros((self.wave, 1 + max(map(len, assigned))), np.int32)
        for row, row_tiles in zip(table, assigned, strict=True):
            row[: 1 + len(row_tiles)] = len(row_tiles), *row_tiles
        return table

    def work_tiles(self, block: Array, longest_first: Any = None) -> Array:
        """The number of work tiles of a thread block; the argument is the table above, in device memory."""
        block, begin, end = self._in_wave(block)
        if self.later_tiles_are_longer:
            count = self.paired + longest_first[block, 0]
        else:
            count = lax.div(self.number - 1 - block, np.int32(self.wave)) + 1
        return jnp.minimum(count, end) - begin if len(self.begins) > 1 else count

    def tile(self, block: Array, work_tile: Array, longest_first: Any = None) -> tuple[Array, Array]:
        """The index in its head, and the head, of a thread block's n-th work tile."""
        block, begin, _ = self._in_wave(block)
        work_tile = work_tile + begin
        number, tiles, two = work_tile * self.wave + block, np.int32(self.tiles), np.int32(2)
        if self.later_tiles_are_longer:
            unpaired = longest_first[block, 1 + jnp.clip(work_tile - self.paired, 0, self.longest_first.shape[1] - 2)]
            pair = (lax.div(work_tile, two) * self.wave + block) * 2 + lax.rem(work_tile, two)
            number = lax.select(work_tile < self.paired, pair, unpaired)
            from_an_end = lax.div(lax.rem(number, tiles), two)
            last = lax.rem(lax.rem(number, tiles), two) == 0
            return lax.select(last, self.tiles - 1 - from_an_end, from_an_end), lax.div(number, tiles)
        return lax.rem(number, tiles), lax.div(number, tiles)

    def _in_wave(self, block: Array) -> tuple[Array, Array | int, Array | int]:
        """The place of a thread block in its wave, and the begin and end of the wave's work tiles."""
        begin, end = self.begins[-1], self.number
        for n in reversed(range(1, len(self.begins))):
            in_earlier_wave = block < n * self.wave
            begin, end = (
                jnp.where(in_earlier_wave, self.begins[n - 1], begin),
                jnp.where(in_earlier_wave, self.begins[n], end),
            )
        return lax.rem(block, np.int32(self.wave)) if len(self.begins) > 1 else block, begin, end


@dataclass(frozen=True)
class DynamicTileScheduler:
    """Work tiles whose costs are known at run time only (packed sequences, segments, lists of blocks), head after head.

    A thread block for each multiprocessor takes the next work tile of all when it has loaded the one before
    (work_tiles.py), as with FlashAttention-3's dynamic scheduler. Where kernels are not persistent there is a thread
    block for each work tile, and the device launches them in the same order. The tiles of the last heads are sorted
    together, the longest first, so that short ones are left at the end.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        persistent: whether there is one thread block for each multiprocessor.
        processors: streaming multiprocessors of the device.
    """

    tiles: int
    heads: int
    persistent: bool
    processors: int

    @property
    def number(self) -> int:
        return self.tiles * self.heads

    @property
    def blocks(self) -> int:
        return min(self.number, self.processors) if self.persistent else self.number

    @property
    def in_order(self) -> int:
        """The heads before the last ones."""
        return self.heads - min(self.heads, -(-UNPAIRED * self.processors // self.tiles))

    def order(self, costs: Array) -> Array:
        """The tiles of the last heads, numbered from 0, in the order in which they are computed, by their costs
        [heads, tiles].
        """
        return longest_first(costs[self.in_order :].reshape(-1))

    def tile_of(self, number: Array, order: Any) -> Array:
        """The work tile that is computed as the n-th of all, from the table `order`."""
        before = self.in_order * self.tiles
        of_last = order[jnp.clip(number - before, 0, self.number - before - 1)]
        return lax.select(number < before, number, before + of_last)

    def place(self, tile: Array) -> tuple[Array, Array]:
        """The index in its head, and the head, of a work tile."""
        return lax.rem(tile, np.int32(self.tiles)), lax.div(tile, np.int32(self.tiles))

    def work_tiles(self, block: Array, order: Any) -> Array:
        """The number of work tiles of a thread block that is not persistent, which is one."""
        del block, order
        return jnp.int32(1)

    def tile(self, block: Array, work_tile: Array, order: Any) -> tuple[Array, Array]:
        """The index in its head, and the head, of the one work tile of such a thread block."""
        del work_tile
        return self.place(self.tile_of(block, order))


@dataclass(frozen=True)
class SingleTileScheduler:
    """One thread block for each work tile, not persistent; the device launches them in order.

    `together` heads are computed at a time, their longest tiles first. At the end it is more heads at a time, so that
    short tiles come last and all multiprocessors finish at about the same time.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        together: heads at a time.
        later_tiles_are_longer: later tiles of a head see more keys; otherwise earlier ones come first.
        processors: streaming multiprocessors of the device.
        evens_out: at the end more heads at a time.
    """

    tiles: int
    heads: int
    together: int
    later_tiles_are_longer: bool
    processors: int
    evens_out: bool = True

    @property
    def blocks(self) -> int:
        return self.tiles * self.heads

    @property
    def last(self) -> int:
        """Heads at the end: those of two waves of tiles, which take as long as the longest tile."""
        return min(self.heads, max(self.together, -(-2 * self.processors // self.tiles) if self.evens_out else 0))

    @property
    def longest_first(self) -> None:
        return None

    def work_tiles(self, block: Array, longest_first: None = None) -> Array:
        """The number of work tiles of a thread block, which is one."""
        del block, longest_first
        return jnp.int32(1)

    def tile(self, block: Array, work_tile: Array | int = 0, longest_first: None = None) -> tuple[Array, Array]:
        """The index in its head, and the head, of the one work tile of a thread block."""
        del work_tile, longest_first
        before = self.heads - self.last
        first = lax.div(block, np.int32(self.together * self.tiles)) * self.together
        heads, ending = jnp.minimum(self.together, before - first), block >= before * self.tiles
        first, heads = jnp.where(ending, before, first), jnp.where(ending, self.last, heads)
        number = block - first * self.tiles
        place, head = lax.div(number, heads), first + lax.rem(number, heads)
        return self.tiles - 1 - place if self.later_tiles_are_longer else place, head
