"""The work tiles of a thread block: numbered beforehand, or, where their costs are traced, taken from a queue.

A counter in device memory says how many work tiles thread blocks have taken. The producer takes the next one while it
loads the one before, and passes it on to the consumers, with its range of blocks, in a slot of shared memory. A slot is
written again when its work tile is done: the producer has waited for q of the last but one to be empty by then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import BlockRanges

from .._inline.barriers import count_one, store_of_one
from .._launch import stage_of
from .mask_info import MaskInfo
from .plan import Plan
from .tile_scheduler import DynamicTileScheduler

SLOTS = 4
# Of a slot: how many work tiles were taken before this one, which it is, its range of blocks, and if it hides keys.
TAKEN, TILE, RANGE, HIDES = 0, 1, 2, 6
NUMBERS = 8


class WorkTile(NamedTuple):
    """A block of queries: the first one, their head and batch index, the range of blocks of keys that they see, and
    whether some of these blocks have hidden keys.
    """

    first: Array
    head: Array
    batch: Array
    block_range: Callable[[], BlockRanges]
    hides: Callable[[], Array | None]


def table_of(mask_info: MaskInfo | None, plan: Plan) -> Array | None:
    """The table of the scheduler, if it has one."""
    scheduler = plan.scheduler
    if isinstance(scheduler, DynamicTileScheduler):
        blocks = mask_info.block_ranges[..., 1] - mask_info.block_ranges[..., 0]
        blocks = jnp.broadcast_to(blocks, (plan.problem.B, plan.problem.H, plan.q_tiles))
        return scheduler.order(blocks.reshape(-1, plan.q_tiles))
    return None if scheduler.longest_first is None else jnp.asarray(scheduler.longest_first)


def numbered(longest_first: Any, mask_info: MaskInfo | None, plan: Plan, n: Array) -> WorkTile:
    """The n-th work tile of this thread block, where it is known beforehand."""
    return _work_tile(mask_info, plan, *plan.tile(n, longest_first))


def _work_tile(mask_info: MaskInfo | None, plan: Plan, first: Array, head: Array, batch: Array) -> WorkTile:
    """The work tile of these queries."""
    hidden = None if mask_info is None else mask_info.hidden_columns
    hides = lambda: None if hidden is None else hidden.of_tile(batch, lax.div(first, np.int32(plan.block_q)))
    return WorkTile(first, head, batch, lambda: plan.block_range(first, head, batch, mask_info), hides)


class TileQueue(NamedTuple):
    """counter [1] in device memory; order: the table of the scheduler; slots [SLOTS, NUMBERS], int32.

    full: a barrier for each slot. taken: a barrier of the producer by itself.
    """

    plan: Plan
    counter: Any
    order: Any
    mask_info: MaskInfo
    slots: Any
    full: Any
    taken: Any

    # ---- The producer

    def take(self) -> Array:
        """Takes a work tile, as a number for `pass_on`."""
        return count_one(self.counter.at[0]) + self.plan.scheduler.blocks

    def pass_on(self, n: Array, number: Array) -> Array:
        """Says to the consumers which their n-th work tile is; whether there is one."""
        slot, scheduler = self.slots.at[stage_of(n, SLOTS)], self.plan.scheduler
        store_of_one(slot.at[TAKEN], number)
        plgpu.barrier_arrive(self.taken)
        plgpu.barrier_wait(self.taken)
        number = slot[TAKEN]
        tile = scheduler.tile_of(jnp.minimum(number, scheduler.number - 1), self.order)
        slot[TILE] = tile
        of_tile = _work_tile(self.mask_info, self.plan, *self.plan.placed(*scheduler.place(tile)))
        for i, bound in enumerate(of_tile.block_range()):
            slot[RANGE + i] = bound
        if (hides := of_tile.hides()) is not None:
            slot[HIDES] = hides.astype(jnp.int32)
        plgpu.barrier_arrive(self.full.at[stage_of(n, SLOTS)])
        return number < scheduler.number

    # ---- The consumers, and the producer once it has passed on the tile

    def await_tile(self, n: Array) -> Array:
        """Waits until the n-th work tile is known; whether there is one."""
        plgpu.barrier_wait(self.full.at[stage_of(n, SLOTS)])
        return self.slots[stage_of(n, SLOTS), TAKEN] < self.plan.scheduler.number

    def tile(self, n: Array) -> WorkTile:
        """The n-th work tile."""
        slot = self.slots.at[stage_of(n, SLOTS)]
        block_range = lambda: BlockRanges(*(slot[RANGE + i] for i in range(len(BlockRanges._fields))))
        hides = lambda: None if self.mask_info.hidden_columns is None else slot[HIDES] > 0
        return WorkTile(*self.plan.placed(*self.plan.scheduler.place(slot[TILE])), block_range, hides)


def scratch_of_queue(plan: Plan) -> dict[str, Any]:
    """The shared memory of a queue."""
    if not plan.queued:
        return {}
    return dict(
        slots=plgpu.SMEM((SLOTS, NUMBERS), jnp.int32),
        slot_full=plgpu.Barrier(num_barriers=SLOTS),
        taken=plgpu.Barrier(),
    )
