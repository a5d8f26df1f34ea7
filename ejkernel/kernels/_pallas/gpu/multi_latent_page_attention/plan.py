"""The static plan of the kernel: how rows, splits and blocks of keys are laid out."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._visibility import interval

from .._inline.rows import TILE_COLUMNS
from .._launch import FIRST_BARRIER, ROWS
from ..flash_attention.plan import REGISTERS
from ..flash_attention.problem import Problem
from ..ragged_page_attention.work import WorkTile

# Keys of a tile; a stage holds one.
BLOCK_K = 64
STAGES = 2
CONSUMERS = 2
# Columns of o that one of the two consumer warpgroups accumulates.
HALF = 256
# Named barriers, after that of a second producer: the empty stages; the weights of even and of odd tiles; the sums at
# the end; the barriers of lists; the queries in float16.
K_EMPTY = FIRST_BARRIER + 1
P_FULL = K_EMPTY + STAGES
SUMS = P_FULL + 2
READY = SUMS + 1
Q_ROUNDED = READY + 1
# Producers that share the rows of a tile of eight bits, which they convert, and registers of a thread of a consumer and
# of a producer, by the rows of a thread block.
CONVERTING_PRODUCERS = {16: 2, 32: 2, 64: 1}
CONVERTING_REGISTERS = {16: (176, 80), 32: (192, 64), 64: (200, 104)}


class Keys(NamedTuple):
    """Where the keys of a step lie, in device memory.

    Attributes:
        pages: [slots, r + d], of all pools.
        tables: [sequences, columns] int32, the pages of a sequence; with lists, [tokens, columns], slots, −1 for none.
        bits: [tokens, columns / 32] int32, which entries of a list are keys; None without lists.
        scales: [slots or 1, 1] float32, by which slots are multiplied, or all; or None.
        work_tiles, total: the table [most_tiles, 6], and how many of its entries are work tiles, [1].
    """

    pages: Any
    tables: Any
    bits: Any
    scales: Any
    work_tiles: Any
    total: Any


@dataclass(frozen=True)
class Plan:
    """The shapes of one call, and how it is divided.

    Attributes:
        H, R, D: heads, and features of a latent and of its rotary part.
        sequences, pages, page, pools, columns: of a batch; of a pool; slots of a page; pools; pages of a table's row.
        lists: whether each token has a list of slots, a row of tables with pages of one slot.
        converts: whether pages have eight bits, which the producers convert.
        scales_slots: whether each slot has a scale.
        dtype: of q.
        rows: heads of tokens of a thread block.
        tokens: most tokens of a work tile.
        splits: parts that the keys of a work tile are cut into.
        most_tiles: an upper bound of the number of work tiles, of which each has a token.
        left: how many keys before its own a token sees; None for all.
        scale, softcap: the options of the call.
    """

    H: int
    R: int
    D: int
    sequences: int
    pages: int
    page: int
    pools: int
    columns: int
    lists: bool
    converts: bool
    scales_slots: bool
    dtype: Any
    rows: int
    tokens: int
    splits: int
    most_tiles: int
    left: int | None
    scale: float
    softcap: float | None

    @property
    def parts(self) -> int:
        """Tiles of q: of its latent, and one of its rotary part."""
        return self.R // TILE_COLUMNS + 1

    @property
    def warpgroups_of_stage(self) -> int:
        """Those that fill a stage and empty it: the producers, and both consumers or the one that has the stage."""
        return self.producers + (CONSUMERS if self.rows == ROWS else 1)

    @property
    def producers(self) -> int:
        """Producer warpgroups, which share the rows of a tile of keys."""
        return CONVERTING_PRODUCERS[self.rows] if self.converts else 1

    @property
    def rounds_queries(self) -> bool:
        """Whether queries in bfloat16 are made float16."""
        return self.converts and not self.scales_slots and self.dtype == "bfloat16"

    @property
    def dtype_of_products(self) -> Any:
        return np.dtype("float16") if self.rounds_queries else self.dtype

    @property
    def registers(self) -> tuple[int, int]:
        """Those of a thread of a consumer, and of a producer."""
        return CONVERTING_REGISTERS[self.rows] if self.converts else REGISTERS[CONSUMERS]

    @property
    def head_blocks(self) -> int:
        return math.ceil(self.H / self.rows)

    @property
    def blocks(self) -> int:
        """Thread blocks: one for each part of the keys of each block of heads of a work tile."""
        return self.most_tiles * self.splits * self.head_blocks

    @property
    def rows_of_producer(self) -> int:
        """Of a tile of keys."""
        return BLOCK_K // self.producers

    @property
    def rows_of_page(self) -> int:
        """The slots of a page that a producer copies to a tile of keys at once."""
        return min(self.page, self.rows_of_producer)

    @property
    def copies(self) -> int:
        """Copies of pages that a producer's rows take."""
        return self.rows_of_producer // self.rows_of_page

    @property
    def exponent(self) -> float:
        """The factor that makes a logit of `tiles.logits` into an exponent of 2."""
        return self.problem.exponent

    @property
    def problem(self) -> Problem:
        """What the logits of the dense kernel are told."""
        return Problem(
            *(1, 1, 1, self.H, 1, self.R + self.D, self.R, self.scale, self.softcap),
            low=None, high=0, packed=False, segmented=False, dtype=np.dtype("float32"),
        )  # fmt: skip

    def place(self) -> tuple[Array, Array, Array]:
        """The work tile, part and block of heads of this thread block; those with the same keys are neighbours."""
        block, head_blocks = lax.axis_index("block"), jnp.int32(self.head_blocks)
        part = lax.div(block, head_blocks)
        return lax.div(part, jnp.int32(self.splits)), lax.rem(part, jnp.int32(self.splits)), lax.rem(block, head_blocks)

    def work_tile(self, index: Array, table: Any) -> WorkTile:
        return WorkTile(*(table[index, n] for n in range(len(WorkTile._fields))))

    def count(self, of: WorkTile, heads: Array) -> Array:
        """How many rows of a thread block there are."""
        return (
            jnp.minimum(of.tokens * self.H, self.H - heads * self.rows) if self.head_blocks > 1 else of.tokens * self.H
        )

    def tiles_of_keys(self, of: WorkTile, part: Array) -> tuple[Array, Array]:
        """The first tile of keys of a part, and the number of pairs of tiles; the last may go past the end."""
        end = jnp.minimum(of.position + of.tokens, of.stop)
        begin = lax.div(jnp.clip(of.first_key, 0, jnp.maximum(end, 0)), jnp.int32(BLOCK_K))
        tiles = lax.div(jnp.maximum(end, 0) + (BLOCK_K - 1), jnp.int32(BLOCK_K)) - begin
        pairs = lax.div(tiles + 1, jnp.int32(2))
        each = lax.div(pairs + (self.splits - 1), jnp.int32(self.splits))
        return begin + 2 * part * each, jnp.clip(pairs - part * each, 0, each)

    def cuts(self, of: WorkTile, tile: Array) -> Array:
        """Whether some token of a work tile does not see all keys of a tile by its position and the window."""
        position = of.position - tile * BLOCK_K
        is_cut = position < BLOCK_K - 1
        return is_cut if self.left is None else is_cut | (position + of.tokens - 1 > self.left)

    def visible(self, of: WorkTile, tile: Array, row: Array) -> tuple[Array, Array]:
        """The keys first ≤ j < stop of a tile that the tokens of some rows of a thread block see."""
        begin = tile * BLOCK_K
        token = lax.div(row, jnp.int32(self.H)) if self.tokens > 1 else 0 * row
        return interval(of.position - begin + token, self.left, 0, 0, of.stop - begin)

    def slots(self, of: WorkTile, first: Array, block_tables: Any) -> list[Array]:
        """The first row, of all slots of all pools, of each copy from key `first` on; pages are clamped to the pool."""
        pool = lax.div(of.sequence, jnp.int32(self.sequences)) * self.pages if self.pools > 1 else 0
        page, found = jnp.int32(self.page), []
        for n in range(self.copies):
            key = first + n * self.rows_of_page
            column = jnp.minimum(lax.div(key, page), self.columns - 1)
            number = jnp.clip(block_tables[of.sequence, column], 0, self.pages - 1) + pool
            found.append(number * self.page + (lax.rem(key, page) if self.page > self.rows_of_page else 0))
        return found
