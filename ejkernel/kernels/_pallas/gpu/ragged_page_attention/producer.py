"""The producer warpgroup: q of every work tile, and the blocks of its keys, copied page by page into their stages.

Pages of eight bits are copied into stages of their own, from which another warpgroup converts them to q's dtype, so
that consumers get the same tiles from both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.conversion import convert_tile, scale_of_row, store_of_row
from .._launch import stage_of, sync
from ..flash_attention.consumer_tile import Shared
from .plan import PagedPlan
from .work import WorkTile


class PageTiles(NamedTuple):
    """Blocks of pages of eight bits in shared memory, [page_stages, block_k, d], and their barriers: a block is there,
    and it is converted.

    If slots have scales, `scales` [·, block_k] float32 has those of keys, by which consumers multiply their products,
    in scale_stages rows, and in page_stages rows those of values, which are multiplied when they are converted.
    """

    k: Any
    v: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    scales: Any = None

    def scales_of_keys(self, plan: PagedPlan) -> Any:
        return self.scales.at[pl.ds(0, plan.scale_stages)]

    def scales_of_values(self, plan: PagedPlan) -> Any:
        return self.scales.at[pl.ds(plan.scale_stages, plan.page_stages)]


class Stream(NamedTuple):
    """Where the producer copies blocks of keys, or of values: the stages and their full barriers, what waits until the
    stage of a step is empty, and the rows that it stores scales in, if slots have some.
    """

    tiles: Any
    full: Any
    stages: int
    await_empty: Callable[[Array], None]
    scales: Any = None

    def stage(self, step: Array) -> tuple[Any, Any]:
        """The stage of a step, and its full barrier."""
        stage = stage_of(step, self.stages)
        return self.tiles.at[stage], self.full.at[stage]


def streams(tiles: Shared, pages: PageTiles | None, plan: PagedPlan) -> tuple[Stream, Stream]:
    """Those of keys and of values: the stages of the consumers, or of the warpgroup that converts."""
    if pages is None:
        empty = lambda first: lambda step: sync(first + stage_of(step, plan.stages), plan.warpgroups)
        return (
            Stream(tiles.k.copies[0], tiles.k_full, plan.stages, empty(plan.k_empty)),
            Stream(tiles.v.copies[0], tiles.v_full, plan.stages, empty(plan.v_empty)),
        )

    def await_empty(barriers: Any, step: Array) -> None:
        stage = barriers.at[stage_of(step, plan.page_stages)]
        pl.when(step >= plan.page_stages)(lambda: plgpu.barrier_wait(stage))

    scales = (None, None) if pages.scales is None else (pages.scales_of_keys(plan), pages.scales_of_values(plan))
    return (
        Stream(pages.k, pages.k_full, plan.page_stages, partial(await_empty, pages.k_empty), scales[0]),
        Stream(pages.v, pages.v_full, plan.page_stages, partial(await_empty, pages.v_empty), scales[1]),
    )


def load(
    q, kv, scales: tuple, block_tables, work_tile_of: Callable, tiles: Shared, pages: PageTiles | None, count: Array,
    plan: PagedPlan,
) -> None:  # fmt: skip
    """Copies the work tiles' queries and blocks of keys, each as its stage becomes empty.

    `scales` are those of keys and of values [slots, g], each if slots have some.
    """
    if plan.registers:
        plgpu.set_max_registers(plan.registers[-1], action="decrease")
    keys, values = streams(tiles, pages, plan)
    rows = min(plan.page, plan.block_k)

    def copy(stream: Stream, step: Array, slots: Sequence[Array], of_head: Array) -> None:
        tile, full = stream.stage(step)
        for n, slot in enumerate(slots):
            plgpu.copy_gmem_to_smem(kv.at[pl.ds(slot, rows), of_head], tile.at[pl.ds(n * rows, rows)], full)

    def store_scales(stream: Stream, step: Array, scale: Array | None) -> None:
        if scale is not None:
            store_of_row(stream.scales.at[stage_of(step, stream.scales.shape[0])], scale)
            plgpu.barrier_arrive(stream.stage(step)[1])

    def one(work_tile, step):
        of, head, split = work_tile_of(work_tile)
        kv_head, block_range = lax.div(head, jnp.int32(plan.problem.group)), plan.blocks_of_keys(of, split)
        _copy_queries(q, of, head, work_tile, tiles, plan)

        def block(i, step):
            slots = plan.slots(of, block_range.end - 1 - i, block_tables)
            k_scale, v_scale = (
                None if scale is None else scale_of_row(scale, slots, kv_head, rows) for scale in scales
            )
            keys.await_empty(step)
            copy(keys, step, slots, 2 * kv_head)
            values.await_empty(step)
            # The values of an earlier block have been multiplied, and before that its products by the scales of its
            # keys, over which these are stored.
            store_scales(keys, step, k_scale)
            copy(values, step, slots, 2 * kv_head + 1)
            store_scales(values, step, v_scale)
            return step + 1

        return lax.fori_loop(0, block_range.end - block_range.begin, block, step)

    lax.fori_loop(0, count, one, jnp.int32(0))


def convert(
    work_tile_of: Callable, tiles: Shared, pages: PageTiles, scales_values: bool, count: Array, plan: PagedPlan
) -> None:
    """The warpgroup that converts the blocks of keys of the work tiles, each as its stage becomes empty."""
    plgpu.set_max_registers(plan.registers[1], action="decrease")

    def one(work_tile, step):
        of, _, split = work_tile_of(work_tile)
        block_range = plan.blocks_of_keys(of, split)

        def block(_, step):
            stage, place = stage_of(step, plan.stages), stage_of(step, plan.page_stages)
            scales = pages.scales_of_values(plan).at[place] if scales_values else None
            for source, arrived, converted, empty, target, full, of_rows in (
                (pages.k, pages.k_full, pages.k_empty, plan.k_empty, tiles.k.copies[0], tiles.k_full, None),
                (pages.v, pages.v_full, pages.v_empty, plan.v_empty, tiles.v.copies[0], tiles.v_full, scales),
            ):
                plgpu.barrier_wait(arrived.at[place])
                sync(empty + stage, plan.warpgroups)
                convert_tile(target.at[stage], source.at[place], of_rows)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[stage])
                plgpu.barrier_arrive(converted.at[place])
            return step + 1

        return lax.fori_loop(0, block_range.end - block_range.begin, block, step)

    lax.fori_loop(0, count, one, jnp.int32(0))


def _copy_queries(q, of: WorkTile, head: Array, work_tile: Array, tiles: Shared, plan: PagedPlan) -> None:
    """Copies the queries of a work tile, once its stage is empty."""
    stage = stage_of(work_tile, plan.q_stages)
    pl.when(work_tile >= plan.q_stages)(lambda: plgpu.barrier_wait(tiles.q_empty.at[stage]))
    for n, part in enumerate(tiles.q.copies):
        heads = pl.ds(head, plan.packed_heads) if plan.packed_heads > 1 else head
        source = q.at[pl.ds(of.token, plan.tokens), heads, pl.ds(n * plan.row_width, plan.row_width)]
        plgpu.copy_gmem_to_smem(source, part.at[stage], tiles.q_full.at[stage])
