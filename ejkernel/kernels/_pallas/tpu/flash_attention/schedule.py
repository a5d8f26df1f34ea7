"""The mask info and the tile schedule of the kernels: which tiles of the logits are computed, in which order.

By causality, windows, packed sequences and padding every query sees an interval of keys, which segment ids may narrow.
A tile is fully masked, partial or full. Fully masked tiles are not in the schedule, and cost neither a step of the grid
nor a copy. For the others the mask info has the chunks of keys that have to be computed, and whether these need a mask.
The schedule is a table of int32 that the index maps read from scalar memory: a constant if nothing that it depends on
is traced; otherwise computed from segment ids and cu_seqlens, and then the number of steps is traced too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import Operands

from .problem import Problem, pad_axis


class TileMask(NamedTuple):
    """The part of a tile that is computed: its chunks of keys first ≤ n < last, with or without a mask."""

    first: int
    last: int
    needs_mask: bool


# In a schedule, fully masked tiles only pad the rows of batch elements that have fewer tiles than others.
FULLY_MASKED = TileMask(0, 0, False)
# A kernel has code for each tile mask: in all at most for so many whole tiles. With more, tiles are computed whole.
MOST_UNROLLED_TILES = 3
# The bits of a block number and of a tile mask in an entry of the table: major block, minor block, tile mask.
BLOCK_BITS, MASK_BITS = 14, 4


class MaskInfo(NamedTuple):
    """The tile mask of each tile, as an index [b?, q_blocks, k_blocks] into `tile_masks`; 0 is FULLY_MASKED.

    If masks differ between heads, the first axis has `heads` entries for each batch element. `possible`
    [q_blocks, k_blocks] is known when the program is traced: all other tiles are fully masked. None means all tiles.
    """

    block_mask: Any
    tile_masks: tuple[TileMask, ...]
    heads: int = 1
    possible: np.ndarray | None = None


class Schedule(NamedTuple):
    """The tiles that a kernel computes, one per step of the grid.

    Attributes:
        table: [b?, n] int32, the tiles as packed (major block, minor block, tile mask).
        steps: the number of tiles, at most n.
        tile_masks: the tile masks that entries of the table index.
        one_tile_per_block: every major block has exactly one tile.
        heads: the rows of the table for each batch element: 1, or one per head (or key/value head).
        blocks_per_head: the minor blocks of each head if a row lists the tiles of all heads of a group, head by head; 0
            if the listed tiles are the same for all heads.
    """

    table: Any
    steps: Any
    tile_masks: tuple[TileMask, ...]
    one_tile_per_block: bool
    heads: int = 1
    blocks_per_head: int = 0

    @property
    def numbers(self) -> list[int]:
        """The indices of the tile masks that the table may hold."""
        if not isinstance(self.table, np.ndarray):
            return list(range(len(self.tile_masks)))
        return np.unique(_mask_number(self.table)).tolist()

    def tiles(self, batch: int) -> int:
        """The number of tiles that are computed for all batch elements; an upper bound if that is traced."""
        if not isinstance(self.table, np.ndarray):
            return batch * self.table.shape[1]
        return int((_mask_number(self.table) != 0).sum()) * (batch // self.table.shape[0])


class Step(NamedTuple):
    """An entry of the table, and whether it is the first or the last tile of its major block."""

    major: Any
    minor: Any
    mask_number: Any
    is_first: Any
    is_last: Any


def blocks_at(schedule: Schedule, table, b, h, step) -> tuple[Any, Any]:
    """(major, minor) block of a step, for a batch element and a head."""
    entry = _entry(schedule, table, b, h, step)
    return entry >> BLOCK_BITS + MASK_BITS, entry >> MASK_BITS & (1 << BLOCK_BITS) - 1


def step_at(schedule: Schedule, table, b, h, step) -> Step:
    """The entry of a step, for use in a kernel, where the table is a ref."""
    steps = table.shape[1]
    major, minor = blocks_at(schedule, table, b, h, step)
    number = _mask_number(_entry(schedule, table, b, h, step))
    if schedule.one_tile_per_block:
        return Step(major, minor, number, True, True)
    before, _ = blocks_at(schedule, table, b, h, jnp.maximum(step - 1, 0))
    after, _ = blocks_at(schedule, table, b, h, jnp.minimum(step + 1, steps - 1))
    end = pl.num_programs(2) - 1
    is_first, is_last = (step == 0) | (before != major), (step == end) | (after != major)
    return Step(major, minor, number, is_first, is_last)


def _entry(schedule: Schedule, table, b, h, step):
    row = b * schedule.heads if table.shape[0] > schedule.heads else 0
    return table[row + h if schedule.heads > 1 else row, step]


def _mask_number(entry):
    return entry & (1 << MASK_BITS) - 1


def schedule_of(mask_info: MaskInfo, by: str, every: bool = False, group: int = 1) -> Schedule:
    """The schedule of tiles that are not fully masked, sorted by blocks of "queries" or "keys".

    Each of these blocks has at least one tile. With `every`, fully masked tiles are listed too, for a kernel whose
    output has a block for every tile. By keys, `group` heads with separate masks share one list.
    """
    numbers, heads, possible, blocks_per_head = mask_info.block_mask, mask_info.heads, mask_info.possible, 0
    if by == "keys" and heads > 1 and not every:
        rows, blocks_per_head, columns = numbers.shape
        numbers, heads = numbers.reshape(-1, group, blocks_per_head, columns), heads // group
        numbers = numbers.transpose(0, 3, 1, 2).reshape(rows // group, columns, -1)
        possible = None if possible is None else np.tile(possible.T, group)
    elif by == "keys":
        numbers, possible = numbers.swapaxes(1, 2), None if possible is None else possible.T
    xp = np if isinstance(numbers, np.ndarray) else jnp
    batch, _, minors = numbers.shape
    placeholder = ~(numbers != 0).any(2, keepdims=True) & (xp.arange(minors) == 0)
    listed = ((numbers != 0) | placeholder | every).reshape(batch, -1)
    numbers, count = numbers.reshape(batch, -1), listed.sum(1)
    tiles = listed.shape[1] if xp is jnp else int(count.max())
    if possible is not None and not every:
        tiles = int(possible.sum(1).clip(1).sum())

    order = xp.argsort(~listed, axis=1, stable=True)
    position = xp.arange(tiles)
    chosen = xp.take_along_axis(order, xp.minimum(position, count[:, None] - 1), axis=1)
    numbers = xp.where(position < count[:, None], xp.take_along_axis(numbers, chosen, axis=1), 0)
    table = (chosen // minors << BLOCK_BITS + MASK_BITS) | (chosen % minors << MASK_BITS) | numbers
    steps = tiles if xp is np else count.max()
    return Schedule(table.astype(xp.int32), steps, mask_info.tile_masks, minors == 1, heads, blocks_per_head)


def mask_info_of(operands: Operands, problem: Problem) -> MaskInfo:
    """The mask info of a call; if visibility is traced, all chunks of a tile are computed."""
    chunks, visibility = problem.block_k // problem.chunk, visibility_of(operands, problem.spec)
    if operands.mask is None and operands.q_segment_ids is None and operands.cu_seqlens_q is None:
        return _static_mask_info(*visibility.blocks(problem.block_q, problem.chunk, np), chunks)
    some, full = visibility.blocks(problem.block_q, problem.block_k)
    tile_masks = (FULLY_MASKED, TileMask(0, chunks, True), TileMask(0, chunks, False))
    return MaskInfo(jnp.where(some, jnp.where(full, 2, 1), 0), tile_masks)


def _static_mask_info(some: np.ndarray, full: np.ndarray, chunks: int) -> MaskInfo:
    """The mask info from which (block of queries, chunk of keys) have visible pairs, and which are full, [1, ·, ·]."""
    in_tiles = lambda x: pad_axis(x, 2, -(-x.shape[2] // chunks) * chunks).reshape(*x.shape[:2], -1, chunks)
    some, full = in_tiles(some), in_tiles(full)
    computed = some.any(3)
    first = np.where(computed, some.argmax(3), 0)
    last = np.where(computed, chunks - some[..., ::-1].argmax(3), 0)
    found = _distinct(first, last, (some & ~full).any(3))
    code = sum(mask.last - mask.first for mask in found.tile_masks)
    if code > MOST_UNROLLED_TILES * chunks or len(found.tile_masks) > 1 << MASK_BITS:
        needs_mask = computed & ~(some & full).all(3)
        return _distinct(np.zeros_like(first), np.where(computed, chunks, 0), needs_mask)
    return found


def _distinct(first: np.ndarray, last: np.ndarray, needs_mask: np.ndarray) -> MaskInfo:
    """The mask info from the fields of each tile's mask, with each distinct tile mask once and FULLY_MASKED first."""
    rows = np.stack([first, last, needs_mask], -1).reshape(-1, 3)
    found, number = np.unique(np.concatenate([[FULLY_MASKED], rows]), axis=0, return_inverse=True)
    tile_masks = tuple(TileMask(int(first), int(last), bool(needs_mask)) for first, last, needs_mask in found)
    return MaskInfo(number.reshape(-1)[1:].reshape(first.shape), tile_masks)
