"""The static plan of the kernel: that of the dense forward, and where work tiles and pages are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._visibility import BlockRanges

from ..flash_attention.configs import SHARED_BYTES
from ..flash_attention.head_dims import row_width
from ..flash_attention.plan import Plan
from . import pages_per_block
from .work import WorkTile

# Registers of a thread of a consumer, of the warpgroup that converts and of the producer, by the number of consumers.
CONVERTING_REGISTERS = {1: (240, 96, 56), 2: (216, 40, 40)}


@dataclass(frozen=True, kw_only=True)
class PagedPlan(Plan):
    """The plan of a step whose keys are in pages; its problem is that of one sequence, whose table has all columns.

    Attributes:
        sequences: of a batch.
        page: slots of a page.
        pages: of a pool, and `pools` how many there are: 1, or one for each batch.
        columns: pages of a sequence in its table.
        most_tiles: work tiles, of all heads together, that the table has places for.
        packed_heads: heads of a group that a work tile has together, each token's in rows one after the other.
        page_dtype: of the pages: that of the problem, or eight bits, which are converted to it.
        scales_slots: whether the keys or values of a slot have a scale.
        splits: of the keys of each work tile.
        has_drafts: whether a mask says who sees the last keys of a step, which its work tiles leave out.
    """

    sequences: int
    page: int
    pages: int
    pools: int
    columns: int
    most_tiles: int
    packed_heads: int
    page_dtype: np.dtype
    scales_slots: bool
    splits: int = 1
    has_drafts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a work tile at most."""
        return self.block_q // self.packed_heads

    @property
    def tiles_of_tokens(self) -> int:
        """Work tiles that the same tokens have, one for each split of their keys and each set of packed heads."""
        return self.problem.H // self.packed_heads * self.splits

    @property
    def persistent(self) -> bool:
        """Whether the tile scheduler is persistent: always, as o is stored from registers."""
        return True

    @property
    def converts(self) -> bool:
        """Whether a warpgroup converts pages to the dtype of the problem."""
        return self.page_dtype != self.problem.dtype

    @property
    def registers(self) -> tuple[int, ...] | None:
        """Those of a thread of a consumer, of the warpgroup that converts, if any, and of the producer."""
        return CONVERTING_REGISTERS[self.consumers] if self.converts else super().registers

    @property
    def q_in_registers(self) -> bool:
        """Whether q stays there for the whole work tile: if it is one part."""
        return self.row_width == self.problem.D and super().q_in_registers

    @property
    def row_width(self) -> int:
        """Features of a part of q: a row of the widest swizzle that divides a head dim."""
        return row_width(self.problem.D)

    @property
    def columns_of_product(self) -> int:
        """Columns of values that an instruction takes.

        ptxas compiles for the registers that threads have at the launch, 128 of each with four warpgroups, and an
        instruction with 256 columns has as many sums.
        """
        return 128 if self.converts else 256

    @property
    def q_stages(self) -> int:
        return next(stages for stages in (2, 1) if stages == 1 or self.bytes_of_tiles(stages, 1) <= SHARED_BYTES)

    @property
    def page_stages(self) -> int:
        """Blocks of pages that are copied ahead of their conversion."""
        return next(n for n in (2, 1) if n == 1 or self.bytes_of_tiles(self.q_stages, n) <= SHARED_BYTES)

    @property
    def scale_stages(self) -> int:
        """Blocks of keys whose scales are kept: those that are copied ahead, and those in the stages."""
        return self.page_stages + self.stages

    def bytes_of_tiles(self, q_stages: int, page_stages: int) -> int:
        """Of shared memory, with 1 KB for barriers; it is given out by the KB."""
        numbers = (q_stages * self.block_q + 2 * self.stages * self.block_k) * self.problem.dtype.itemsize
        if self.converts:
            numbers += 2 * page_stages * self.block_k
        scales = (2 * page_stages + self.stages) * self.block_k * 4 if self.scales_slots else 0
        return numbers * self.problem.D + -(-scales // 1024) * 1024 + 1024

    @property
    def blocks(self) -> int:
        """Thread blocks: one for each multiprocessor, if there may be work for it."""
        return min(self.most_tiles * self.tiles_of_tokens, self.processors)

    @property
    def pages_per_block(self) -> int:
        """Pages, or parts of a page, that a block of keys is copied from."""
        return pages_per_block(self.page, self.block_k)

    def number(self, work_tile: Array) -> Array:
        """The index of this thread block's n-th work tile among those of all heads: all of some tokens, then the next.

        Every other round is assigned in reverse, so that no thread block always gets the longest tiles.
        """
        block = lax.axis_index("block")
        place = jnp.where(lax.rem(work_tile, jnp.int32(2)) == 0, block, self.blocks - 1 - block)
        return work_tile * self.blocks + place

    def count(self, total: Array) -> Array:
        """The number of work tiles of this thread block, of `total` in the table."""
        total *= self.tiles_of_tokens
        whole = lax.div(total, jnp.int32(self.blocks))
        return whole + (self.number(whole) < total).astype(jnp.int32)

    def nth(self, n: Array, count: Array, has_decodes: Array) -> Array:
        """Which of its `count` work tiles a thread block computes n-th.

        Where decodes come after prefills every other thread block begins with the last, so that memory, which bounds
        decodes, and tensor cores, which bound prefills, are both at work all the time.
        """
        is_reversed = has_decodes & (lax.rem(lax.axis_index("block"), jnp.int32(2)) == 1)
        return jnp.where(is_reversed, count - 1 - n, n)

    def work_tile(self, work_tile: Array, table: Any) -> tuple[WorkTile, Array, Array]:
        """This thread block's n-th work tile, its first head, and which split of its keys it has."""
        number, tiles = self.number(work_tile), jnp.int32(self.tiles_of_tokens)
        index, place = lax.div(number, tiles), lax.rem(number, tiles)
        of, splits = WorkTile(*(table[index, n] for n in range(len(WorkTile._fields)))), jnp.int32(self.splits)
        if self.splits == 1:
            return of, place * self.packed_heads, jnp.int32(0)
        return of, lax.div(place, splits) * self.packed_heads, lax.rem(place, splits)

    def blocks_of_keys(self, of: WorkTile, split: Array) -> BlockRanges:
        """The blocks that a split of a work tile is computed with."""
        whole = self.blocks_of_tokens(of)
        if self.splits == 1:
            return whole
        begin, end = self.bounds(split, whole)
        inside = BlockRanges(*(jnp.clip(bound, begin, end) for bound in whole))
        return inside.at_least_one(-(-self.problem.K // self.block_k))

    def bounds(self, split: Array, whole: BlockRanges) -> tuple[Array, Array]:
        """The first block of a split, and that of the next. The last split has a block, others may have none."""
        length, splits = whole.end - whole.begin, jnp.int32(self.splits)
        return tuple(whole.begin + lax.div(length * n, splits) for n in (split, split + 1))

    def sees_nothing(self, of: WorkTile, split: Array) -> Array:
        """Whether a split has no block; it is computed with one all the same."""
        begin, end = self.bounds(split, self.blocks_of_tokens(of))
        return begin == end

    def blocks_of_tokens(self, of: WorkTile) -> BlockRanges:
        """The blocks with keys that the tokens of a work tile see."""
        blocks, step = -(-self.problem.K // self.block_k), jnp.int32(self.block_k)
        whole = lambda key: lax.div(jnp.maximum(key, 0), step)
        begin = full_begin = jnp.int32(0)
        stop, full_stop = of.position + of.tokens, of.position + 1
        if self.has_drafts:
            stop, full_stop = (jnp.minimum(key, of.stop) for key in (stop, full_stop))
        end, full_end = whole(stop + self.block_k - 1), whole(full_stop)
        if self.problem.low is not None:
            begin = whole(of.position + self.problem.low)
            full_begin = whole(of.position + of.tokens - 1 + self.problem.low + self.block_k - 1)
        full_end = jnp.minimum(full_end, self.problem.K // self.block_k)
        return BlockRanges(begin, end, full_begin, full_end).at_least_one(blocks)

    def slots(self, of: WorkTile, block: Array, block_tables: Any) -> Sequence[Array]:
        """The first row, of all slots of all pools, of each page of a block of keys; pages are clamped to the pool."""
        pool = lax.div(of.sequence, jnp.int32(self.sequences)) * self.pages if self.pools > 1 else 0
        first, page = block * self.block_k, jnp.int32(self.page)
        found = []
        for n in range(self.pages_per_block):
            key = first + n * min(self.page, self.block_k)
            column = jnp.minimum(lax.div(key, page), self.columns - 1)
            number = jnp.clip(block_tables[of.sequence, column], 0, self.pages - 1) + pool
            found.append(number * self.page + (lax.rem(key, page) if self.page > self.block_k else 0))
        return found

    def hides(self, of: WorkTile, block: Array) -> tuple[Array, Array, Array]:
        """Whether a block has slots that may hold NaN, and the range of its rows that do not."""
        begin, end = of.first_key - block * self.block_k, of.stop - block * self.block_k
        return (begin > 0) | (end < self.block_k), begin, end
