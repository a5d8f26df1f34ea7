"""In which order the tiles of queries are worked on, and which block of threads works on which.

What is worked on at once should be of few heads: then their keys and values come from device memory once, and from the
L2 cache to all tiles that see them. 132 tiles of as many heads, at 16k tokens, would want 7 TB/s of an H100.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Bytes of keys and values for which there is room in the L2 cache (50 MB, parts of which hold the same for either half
# of the device), beside q and o.
CACHED = 24 << 20
# Turns of all blocks that are not in pairs, at least: dealt out, they make up for what pairs leave uneven.
LEFT = 4
# What a tile costs beside what it sees, in units of what the next tile of its head sees more.
BESIDE = 0.5


@dataclass(frozen=True)
class Walk:
    """Some blocks of threads walk over the tiles, head after head.

    Where later tiles of a head see more keys, a block takes the last and the first of them one after the other, or the
    last but one and the second …: all pairs have as much to do. What is left of the last heads when all blocks have had
    the same number of pairs is dealt out before the kernel runs, tile by tile, those that see most keys first, each to
    the block that has least to do.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        rising: later tiles see more keys.
        processors: streaming multiprocessors of the device.
    """

    tiles: int
    heads: int
    rising: bool
    processors: int

    @property
    def number(self) -> int:
        return self.tiles * self.heads

    @property
    def blocks(self) -> int:
        return min(self.number, self.processors)

    @property
    def paired(self) -> int:
        """Turns of a block in pairs."""
        last = min(self.heads, -(-LEFT * self.processors // self.tiles))
        return (self.heads - last) * self.tiles // (2 * self.processors) * 2 if self.rising else 0

    @cached_property
    def dealt(self) -> np.ndarray | None:
        """For each block how many tiles it has after its pairs, and which, int32; None where all have as much to do."""
        if not self.rising:
            return None
        place = np.arange(self.number) % self.tiles
        work = np.where(place % 2 == 0, self.tiles - 1 - place // 2, place // 2) + 1 + BESIDE
        pairs = work[: self.paired * self.blocks].reshape(-1, self.blocks, 2).sum((0, 2))
        blocks = [(load, block) for block, load in enumerate(pairs.tolist())]
        heapq.heapify(blocks)
        hands: list[list[int]] = [[] for _ in blocks]
        left = range(self.paired * self.blocks, self.number)
        for number in sorted(left, key=lambda n: -work[n]):
            load, block = heapq.heappop(blocks)
            hands[block].append(number)
            heapq.heappush(blocks, (load + work[number], block))
        table = np.zeros((self.blocks, 1 + max(map(len, hands))), np.int32)
        for row, hand in zip(table, hands, strict=True):
            row[: 1 + len(hand)] = len(hand), *hand
        return table

    def turns(self, block: Array, dealt: Any = None) -> Array:
        """How many tiles a block has; `dealt` holds what the property says."""
        if self.rising:
            return self.paired + dealt[block, 0]
        return lax.div(self.number - 1 - block, jnp.int32(self.blocks)) + 1

    def tile(self, block: Array, turn: Array, dealt: Any = None) -> tuple[Array, Array]:
        """The place in its head, and the head, of the tile of a block in one of its turns."""
        number, tiles, two = turn * self.blocks + block, jnp.int32(self.tiles), jnp.int32(2)
        if self.rising:
            alone = dealt[block, 1 + jnp.clip(turn - self.paired, 0, self.dealt.shape[1] - 2)]
            pair = (lax.div(turn, two) * self.blocks + block) * 2 + lax.rem(turn, two)
            number = jnp.where(turn < self.paired, pair, alone)
            from_an_end = lax.div(lax.rem(number, tiles), two)
            last = lax.rem(lax.rem(number, tiles), two) == 0
            return jnp.where(last, self.tiles - 1 - from_an_end, from_an_end), lax.div(number, tiles)
        return lax.rem(number, tiles), lax.div(number, tiles)


@dataclass(frozen=True)
class Each:
    """A block of threads for each tile. The device begins them in turn, as it has room.

    Some heads at a time, and of these the tiles that see most first. At the end more heads at a time, so that short
    tiles come last and all blocks end at about the same time.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        together: heads at a time.
        rising: later tiles see more, and earlier ones otherwise.
        processors: streaming multiprocessors of the device.
    """

    tiles: int
    heads: int
    together: int
    rising: bool
    processors: int

    @property
    def blocks(self) -> int:
        return self.tiles * self.heads

    @property
    def last(self) -> int:
        """Heads at the end: of twice as many tiles as run at once, which take as long as the longest of them."""
        return min(self.heads, max(self.together, -(-2 * self.processors // self.tiles)))

    @property
    def dealt(self) -> None:
        return None

    def turns(self, block: Array, dealt: None = None) -> Array:
        del block, dealt
        return jnp.int32(1)

    def tile(self, block: Array, turn: Array | int = 0, dealt: None = None) -> tuple[Array, Array]:
        """As of `Walk`."""
        del turn, dealt
        before = self.heads - self.last
        first = lax.div(block, jnp.int32(self.together * self.tiles)) * self.together
        heads, ending = jnp.minimum(self.together, before - first), block >= before * self.tiles
        first, heads = jnp.where(ending, before, first), jnp.where(ending, self.last, heads)
        number = block - first * self.tiles
        place, head = lax.div(number, heads), first + lax.rem(number, heads)
        return self.tiles - 1 - place if self.rising else place, head
