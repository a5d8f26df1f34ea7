"""Producers of tiles of eight bits, which they convert to the dtype of products and share by rows.

A stage has sixteen bits, and shared memory no place beside the stages. So a producer holds its rows of the next tile in
registers until a stage becomes empty (`converted_rows`). Rows of pages come to the L2 cache before that.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._inline.conversion import store_of_row
from .._inline.converted_rows import InList, InPages, convert_rows, load_rows, prefetch_rows
from .._launch import stage_of, sync
from .plan import K_EMPTY, STAGES, Plan


def convert_tiles(
    shared: Any, pages: Any, count: Array, number: Array, rows_of: Callable[[Array], InPages | InList],
    scale_of: Callable[[Array], tuple[Array, tuple[Array, Array] | None]], plan: Plan,
) -> None:  # fmt: skip
    """The rows of producer `number` of so many tiles; rows_of(n) are those of tile n.

    If slots have scales, scale_of(n) has those of the rows, one in each thread, and which rows are valid, if not all:
    the scales of others may be NaN.
    """
    own = pl.ds(number * plan.rows_of_producer, plan.rows_of_producer)

    def convert(n, words):
        stage, upcoming = stage_of(n, STAGES), rows_of(n + 1)
        scale, valid = scale_of(n) if plan.scales_slots else (None, None)
        if not plan.lists:
            prefetch_rows(pages, upcoming, n + 1 < count)
        sync(K_EMPTY + stage, plan.warpgroups_of_stage)
        targets = shared.k_latent.at[stage, own], shared.k_rope.at[stage, own]
        words = convert_rows(targets, words, pages, upcoming, n + 1 < count)
        if scale is not None:
            store_of_row(shared.k_scales.at[stage, own], scale, valid)
        plgpu.commit_smem()
        plgpu.barrier_arrive(shared.k_full.at[stage])
        return words

    words = load_rows(pages, rows_of(jnp.int32(0)), plan.rows_of_producer, (plan.R, plan.D), count > 0)
    lax.fori_loop(0, count, convert, words)


def barriers(plan: Plan) -> plgpu.Barrier:
    """One for each stage, which counts its producers."""
    return plgpu.Barrier(num_barriers=STAGES, num_arrivals=plan.producers)
