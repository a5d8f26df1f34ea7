"""The tile of keys of a thread block of the backward, and the order in which it streams blocks of queries."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._visibility import BlockRanges

from .backward_plan import Plan
from .mask_info import MaskInfo
from .problem import blocks_of_band, divisor


class KeyTile(NamedTuple):
    """The stationary keys of a thread block, as a warpgroup computes them once: scalars of the kernel.

    first: of the keys; past the last key where the last group is not full. kv_head, batch: of the keys. split: which of
    the thread blocks that share the tile this is. band: the blocks of queries that the band lets these keys see, where
    there is no mask of arrays. scale: the factor of q·kᵀ for all heads that share the keys.
    """

    plan: Plan
    mask_info: MaskInfo | None
    first: Array
    kv_head: Array
    batch: Array
    split: Array | int
    band: BlockRanges | None
    scale: Array | float

    def block_range(self) -> BlockRanges:
        """The blocks of queries that see these keys; those of arrays are read where needed, to save registers."""
        if self.band is not None:
            return self.band
        return self.mask_info.block_range(self.number, self.batch, self.kv_head)

    @property
    def number(self) -> Array:
        """The index of the tile in its head."""
        return lax.div(self.first, np.int32(self.plan.keys))

    def steps(self) -> Array:
        """Blocks of queries of all the heads that share the keys: those of this thread block."""
        steps = self._steps_of_tile()
        if self.plan.splits == 1:
            return steps
        return self._first_step(steps, self.split + 1) - self.step_of_tile(0)

    def step_of_tile(self, step: Array | int) -> Array:
        """The number of a step of this thread block among those of its tile."""
        if self.plan.splits == 1:
            return step
        return self._first_step(self._steps_of_tile(), self.split) + step

    def _first_step(self, steps: Array, split: Array) -> Array:
        """The first of a tile's steps that a split has. Splits have as many steps each; or, of tiles that add to dq in
        turn, the same blocks of queries, so that each follows the split of the tile before as the tiles do.
        """
        plan, group = self.plan, self.plan.problem.group
        if not plan.in_tile_order:
            return lax.div(steps * split, np.int32(plan.splits))
        before_tile = (plan.blocks - self.block_range().end) * group
        return jnp.clip(lax.div(plan.blocks * group * split, np.int32(plan.splits)) - before_tile, 0, steps)

    def _steps_of_tile(self) -> Array:
        plan, block_range = self.plan, self.block_range()
        steps = (block_range.end - block_range.begin) * (1 if plan.listed else plan.problem.group)
        return jnp.where(self.first < plan.problem.K, steps, 0) if plan.circular else steps

    def place(self, step: Array) -> tuple[Array, Array]:
        """The block of queries and the head of a step: one head of the group after the other.

        Tiles that add to dq in turn begin with the last block, of all heads, so that a tile with fewer blocks does not
        come to those of the next head before the tile that it follows.

        A list is that of a head of k and v, and has the blocks of all heads of its group, numbered head by head.
        """
        plan, group = self.plan, self.plan.problem.group
        step = self.step_of_tile(step)
        if plan.listed:
            block = self.mask_info.block(step, self.number, self.batch, self.kv_head)
            blocks = np.int32(plan.blocks)
            return lax.rem(block, blocks), self.kv_head * group + lax.div(block, blocks)
        block_range = self.block_range()
        if plan.in_tile_order:
            from_end, head = lax.div(step, np.int32(group)), lax.rem(step, np.int32(group))
            return block_range.end - 1 - from_end, self.kv_head * group + head
        blocks = block_range.end - block_range.begin
        block, head = block_range.begin + lax.rem(step, blocks), self.kv_head * group + lax.div(step, blocks)
        if plan.circular:
            _, number, tiles = self._in_group()
            block = lax.rem(block + lax.div(number * plan.blocks, tiles), np.int32(plan.blocks))
        return block, head

    def rank(self, ranks: Array | None, block: Array) -> Array:
        """How many tiles of keys add to the dq of a block of queries before this one does (dq_semaphore.py)."""
        plan, tile = self.plan, self.number
        if ranks is not None:
            return ranks[self.batch if ranks.shape[0] > 1 else 0, tile, block]
        if not plan.circular:
            low = plan.problem.low
            if low is None:
                return tile
            first = lax.div(jnp.maximum(block * plan.block_q + low, 0), np.int32(plan.keys))
            return tile - jnp.where(block > 0, first, 0)  # tiles that no query sees add to block 0
        before, number, tiles = self._in_group()
        last = lax.div((block + 1) * tiles - 1, np.int32(plan.blocks))
        return before + lax.rem(last - number + tiles, tiles)

    def _in_group(self) -> tuple[Array, Array, Array]:
        """The tiles before the group of this one, its index in it, and the size of the group."""
        tile, group = self.number, np.int32(self.plan.group)
        before = lax.div(tile, group) * group
        return before, tile - before, jnp.minimum(group, self.plan.tiles - before)


def key_tile(plan: Plan, mask_info: MaskInfo | None, softmax_scale: Any = None) -> KeyTile:
    """The tile of this thread block."""
    (first, kv_head, batch, split), band = place_of(plan), None
    if mask_info is None:
        band = blocks_of_band(first, plan.keys, *plan.problem.band(of_keys=True), plan.problem.S, plan.block_q)
    scale = plan.problem.scale if softmax_scale is None else divisor(softmax_scale[batch, kv_head])
    return KeyTile(plan, mask_info, first, kv_head, batch, split, band, scale)


def place_of(plan: Plan) -> tuple[Array, Array, Array, Array | int]:
    """first, kv_head, batch and split of the `KeyTile` of this thread block."""
    place, head = plan.scheduler.tile(lax.axis_index("block"))
    heads, split, groups = plan.problem.G * plan.problem.B, 0, np.int32(plan.problem.G)
    if plan.circular:
        of_all = np.int32(heads * plan.splits)
        place, head = lax.div(head, of_all) * plan.group + place, lax.rem(head, of_all)
    if plan.splits > 1:
        head, split = lax.rem(head, np.int32(heads)), lax.div(head, np.int32(heads))
    return place * plan.keys, lax.rem(head, groups), lax.div(head, groups), split
