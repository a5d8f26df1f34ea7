"""The mask info and the tile schedule of the kernels: which tiles of the logits are computed, in which order.

Causality, windows, packed sequences and a padded end leave every query an interval of keys, and segment ids narrow it.
A tile is fully masked, partial or full. The fully masked ones are not in the schedule, so they cost neither a step of
the grid nor a copy; of the others the mask info tells which chunks of keys have to be computed, and whether these need
a mask. The schedule is a table of int32 that the index maps read from scalar memory: a constant where nothing is
traced; otherwise it is computed from segment ids and cu_seqlens, and the number of steps is traced too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import Operands

from .problem import Problem, pad_axis


class TileMask(NamedTuple):
    """What is computed of a tile: the chunks of keys from `first` to before `last`, with a mask or without."""

    first: int
    last: int
    needs_mask: bool


# In a schedule such tiles only fill the rows of batch elements that have fewer tiles than others.
FULLY_MASKED = TileMask(0, 0, False)
# A kernel has code of its own for each tile mask: of so many tiles, beyond which tiles are computed as a whole.
MOST_CODE = 3
# An entry of the table: the major block, the minor one, the tile mask.
BLOCK_BITS, MASK_BITS = 14, 4


class MaskInfo(NamedTuple):
    """Which tile mask each tile has, a number in `tile_masks`, [b?, q_blocks, k_blocks]; 0 is FULLY_MASKED.

    Where heads have masks of their own, b? is those of each batch element, one after the other, `heads` of them.
    `possible` [q_blocks, k_blocks] is known before the program runs: other tiles are fully masked; None for all.
    """

    block_mask: Any
    tile_masks: tuple[TileMask, ...]
    heads: int = 1
    possible: np.ndarray | None = None


class Schedule(NamedTuple):
    """The tiles that a kernel computes, one a step of the grid.

    Attributes:
        table: [b?, n] of tiles (major block · minor block · tile mask).
        steps: how many of the n there are.
        tile_masks: those that the table names by their number.
        single: there is one tile for each major block.
        heads: how many rows of the table a batch element has: 1, or one for each head (or key/value head).
        of_head: where a row is that of a key/value head, and its tiles are those of each of the heads of the group, one
            head after the other: how many minor blocks each head has; else 0, and the tiles are those of all heads.
    """

    table: Any
    steps: Any
    tile_masks: tuple[TileMask, ...]
    single: bool
    heads: int = 1
    of_head: int = 0

    @property
    def numbers(self) -> list[int]:
        """Of the tile masks that the table may hold."""
        if not isinstance(self.table, np.ndarray):
            return list(range(len(self.tile_masks)))
        return np.unique(_mask_number(self.table)).tolist()

    def tiles(self, batch: int) -> int:
        """How many tiles are computed for all batch elements; where that is traced, at most."""
        if not isinstance(self.table, np.ndarray):
            return batch * self.table.shape[1]
        return int((_mask_number(self.table) != 0).sum()) * (batch // self.table.shape[0])


class Step(NamedTuple):
    """One entry of the table, and whether it is the first or the last of the tiles that have its major block."""

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
    """The entry of a step, in a kernel, where the table is a ref."""
    steps = table.shape[1]
    major, minor = blocks_at(schedule, table, b, h, step)
    number = _mask_number(_entry(schedule, table, b, h, step))
    if schedule.single:
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
    """The tiles that are not fully masked, sorted by "queries" or "keys", at least one for each of these blocks.

    With `every` the fully masked ones are listed too: for a kernel whose output has a block for every tile. By keys, of
    heads that have masks of their own, `group` of them share one list.
    """
    numbers, heads, possible, of_head = mask_info.block_mask, mask_info.heads, mask_info.possible, 0
    if by == "keys" and heads > 1 and not every:
        rows, of_head, columns = numbers.shape
        numbers, heads = numbers.reshape(-1, group, of_head, columns), heads // group
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
    return Schedule(table.astype(xp.int32), steps, mask_info.tile_masks, minors == 1, heads, of_head)


def mask_info_of(operands: Operands, problem: Problem) -> MaskInfo:
    """The mask info of a call; where the visibility is traced, all chunks of a tile are computed."""
    chunks, visibility = problem.block_k // problem.chunk, visibility_of(operands, problem.spec)
    if operands.mask is None and operands.q_segment_ids is None and operands.cu_seqlens_q is None:
        return _static_mask_info(*visibility.blocks(problem.block_q, problem.chunk, np), chunks)
    some, full = visibility.blocks(problem.block_q, problem.block_k)
    tile_masks = (FULLY_MASKED, TileMask(0, chunks, True), TileMask(0, chunks, False))
    return MaskInfo(jnp.where(some, jnp.where(full, 2, 1), 0), tile_masks)


def _static_mask_info(some: np.ndarray, full: np.ndarray, chunks: int) -> MaskInfo:
    """From whether a query of a block may see a key of a chunk, and all see all, [1, q_blocks, chunks of all keys]."""
    in_tiles = lambda x: pad_axis(x, 2, -(-x.shape[2] // chunks) * chunks).reshape(*x.shape[:2], -1, chunks)
    some, full = in_tiles(some), in_tiles(full)
    computed = some.any(3)
    first = np.where(computed, some.argmax(3), 0)
    last = np.where(computed, chunks - some[..., ::-1].argmax(3), 0)
    found = _distinct(first, last, (some & ~full).any(3))
    code = sum(mask.last - mask.first for mask in found.tile_masks)
    if code > MOST_CODE * chunks or len(found.tile_masks) > 1 << MASK_BITS:
        needs_mask = computed & ~(some & full).all(3)
        return _distinct(np.zeros_like(first), np.where(computed, chunks, 0), needs_mask)
    return found


def _distinct(first: np.ndarray, last: np.ndarray, needs_mask: np.ndarray) -> MaskInfo:
    """From the fields of the tile mask of each tile: those that occur, FULLY_MASKED before all, by their numbers."""
    rows = np.stack([first, last, needs_mask], -1).reshape(-1, 3)
    found, number = np.unique(np.concatenate([[FULLY_MASKED], rows]), axis=0, return_inverse=True)
    tile_masks = tuple(TileMask(int(first), int(last), bool(needs_mask)) for first, last, needs_mask in found)
    return MaskInfo(number.reshape(-1)[1:].reshape(first.shape), tile_masks)
