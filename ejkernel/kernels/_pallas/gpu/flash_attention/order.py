"""In which order the tiles of queries are worked on, and which block of threads works on which.

What is worked on at once should be of few heads: then their keys and values come from device memory once, and from the
L2 cache to all tiles that see them. 132 tiles of as many heads, at 16k tokens, would want 7 TB/s.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

# Streaming multiprocessors of an H100 or H200 (SXM).
PROCESSORS = 132
# Bytes of keys and values for which there is room in the L2 cache (50 MB, parts of which hold the same for either half
# of the device), beside q and o.
CACHED = 24 << 20
# Pairs of tiles are the work of whole rounds of all blocks; this share of the last round may be idle at most.
IDLE = 0.2


@dataclass(frozen=True)
class Walk:
    """Some blocks of threads walk over the tiles, head after head.

    Where later tiles of a head see more keys, a block takes the last and the first of them one after the other, or the
    last but one and the second …: all pairs have as much to do. Where too few pairs are left for a last round, a turn
    of a block is a tile, of whatever head, those that see most keys first; and every other turn runs backwards over
    the blocks, so that none has the longer tile of each.

    Attributes:
        tiles: of a head.
        heads: of all batches.
        rising: later tiles see more keys.
    """

    tiles: int
    heads: int
    rising: bool

    @property
    def number(self) -> int:
        return self.tiles * self.heads

    @property
    def paired(self) -> bool:
        pairs = -(-self.number // 2)
        return self.rising and pairs >= (1 - IDLE) * PROCESSORS * -(-pairs // PROCESSORS)

    @property
    def run(self) -> int:
        """Tiles that a block takes one after the other."""
        return 2 if self.paired else 1

    @property
    def runs(self) -> int:
        return -(-self.number // self.run)

    @property
    def blocks(self) -> int:
        return min(self.runs, PROCESSORS)

    def turns(self, block: Array) -> Array:
        """How many tiles a block has."""
        turns = self.run * (lax.div(self.runs - 1 - block, jnp.int32(self.blocks)) + 1)
        missing = self.run * self.runs - self.number  # of the last run
        return turns - missing * (block == (self.runs - 1) % self.blocks) if missing else turns

    def tile(self, block: Array, turn: Array) -> tuple[Array, Array]:
        """The place in its head, and the head, of the tile of a block in one of its turns."""
        tiles, heads, two = jnp.int32(self.tiles), jnp.int32(self.heads), jnp.int32(2)
        if self.rising and not self.paired:
            backwards = (lax.rem(turn, two) == 1) & ((turn + 1) * self.blocks <= self.number)
            number = jnp.where(backwards, self.blocks - 1 - block, block) + turn * self.blocks
            return self.tiles - 1 - lax.div(number, heads), lax.rem(number, heads)
        run = jnp.int32(self.run)
        number = (lax.div(turn, run) * self.blocks + block) * run + lax.rem(turn, run)
        place, head = lax.rem(number, tiles), lax.div(number, tiles)
        if self.paired:
            from_an_end = lax.div(place, two)
            place = jnp.where(lax.rem(place, two) == 0, self.tiles - 1 - from_an_end, from_an_end)
        return place, head


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
    """

    tiles: int
    heads: int
    together: int
    rising: bool

    @property
    def blocks(self) -> int:
        return self.tiles * self.heads

    @property
    def last(self) -> int:
        """Heads at the end: of twice as many tiles as run at once, which take as long as the longest of them."""
        return min(self.heads, max(self.together, -(-2 * PROCESSORS // self.tiles)))

    def turns(self, block: Array) -> Array:
        del block
        return jnp.int32(1)

    def tile(self, block: Array, turn: Array | int = 0) -> tuple[Array, Array]:
        """As of `Walk`."""
        del turn
        before = self.heads - self.last
        first = lax.div(block, jnp.int32(self.together * self.tiles)) * self.together
        heads, ending = jnp.minimum(self.together, before - first), block >= before * self.tiles
        first, heads = jnp.where(ending, before, first), jnp.where(ending, self.last, heads)
        number = block - first * self.tiles
        place, head = lax.div(number, heads), first + lax.rem(number, heads)
        return self.tiles - 1 - place if self.rising else place, head
