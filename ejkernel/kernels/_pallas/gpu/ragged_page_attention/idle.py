"""A consumer warpgroup that has no rows in a work tile of few, as that of a decode."""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._visibility import BlockRanges

from .._launch import arrive, stage_of
from ..flash_attention.consumer_tile import ConsumerTile, Shared
from .plan import PagedPlan


def pass_over(shared: Shared, tile: ConsumerTile, is_idle: Array, plan: PagedPlan, step: Array) -> BlockRanges:
    """The blocks that are left to compute from a step on: if the warpgroup is idle only the first, which it has begun.

    In the steps of the others it takes part in the ping-pong, and says that their stages are empty.
    """

    def of_block(i, _):
        stage, previous = stage_of(step + i - 1, plan.stages), stage_of(step + i - 2, plan.stages)
        plgpu.barrier_wait(shared.k_full.at[stage])
        plan.ping_pong(tile.number, lambda: None)
        arrive(plan.k_empty + stage, plan.warpgroups)
        plgpu.barrier_wait(shared.v_full.at[previous])
        arrive(plan.v_empty + previous, plan.warpgroups)

    begin, end = tile.block_range.begin, tile.block_range.end
    lax.fori_loop(1, jnp.where(is_idle, end - begin, 1), of_block, None)
    first = BlockRanges(end - 1, end, end - 1, end - 1)
    return BlockRanges(*(jnp.where(is_idle, a, b) for a, b in zip(first, tile.block_range, strict=True)))
