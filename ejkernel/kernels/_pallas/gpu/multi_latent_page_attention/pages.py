"""Keys in pages: tokens of a sequence are a work tile, and the producer copies tiles of keys from whole pages by TMA.

A tile may have slots that no token sees, which may hold NaN: the warpgroup that awaits it zeroes them.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands

from .._inline.conversion import scale_of_row
from .._inline.converted_rows import InPages
from .._inline.registers import compare_columns
from .._inline.rows import zero_rows
from .._launch import PER_COLUMN, PER_ROW, ROWS, broadcast_columns, indices, stage_of, sync
from ..ragged_page_attention.work import WorkTile, work_tiles
from . import converting
from .plan import BLOCK_K, K_EMPTY, STAGES, Keys, Plan


def keys_of_step(x: Operands, spec: CacheSpec, plan: Plan) -> Keys:
    """The block tables of all batches, and the work tiles."""
    tiles, total, _ = work_tiles(
        x.context_lens, x.query_start_loc, x.num_seqs, x.q_latent.shape[1], plan.tokens, 1, spec.left,
        plan.columns * plan.page, of_step=None if x.draft_mask is None else jnp.zeros_like(x.context_lens),
    )  # fmt: skip
    pages, tables = x.pages.reshape(-1, plan.R + plan.D), x.block_tables.reshape(-1, plan.columns)
    scales = None if x.k_scale is None else x.k_scale.reshape(-1, 1)
    return Keys(pages, tables, None, scales, tiles, total)


def barriers(plan: Plan) -> plgpu.Barrier:
    """One for each stage, which counts the copies of a tile."""
    return plgpu.Barrier(num_barriers=STAGES, num_arrivals=2 * plan.copies)


def load_tiles(shared: Any, keys: Keys, work_tile: WorkTile, first: Array, pairs: Array, plan: Plan) -> None:
    """The producer: tiles of keys into the stages as they become empty."""

    def load_tile(n, carry):
        stage = stage_of(n, STAGES)
        slots = plan.slots(work_tile, (first + n) * BLOCK_K, keys.tables)
        sync(K_EMPTY + stage, plan.warpgroups_of_stage)
        for copy, slot in enumerate(slots):
            rows, to = pl.ds(slot, plan.rows_of_page), pl.ds(copy * plan.rows_of_page, plan.rows_of_page)
            full = shared.k_full.at[stage]
            plgpu.copy_gmem_to_smem(keys.pages.at[rows, pl.ds(0, plan.R)], shared.k_latent.at[stage, to], full)
            plgpu.copy_gmem_to_smem(keys.pages.at[rows, pl.ds(plan.R, plan.D)], shared.k_rope.at[stage, to], full)
        return carry

    lax.fori_loop(0, 2 * pairs, load_tile, jnp.int32(0))


def convert_tiles(
    shared: Any, keys: Keys, work_tile: WorkTile, first: Array, pairs: Array, number: Array, plan: Plan
) -> None:
    """Producer `number`: its rows of tiles of eight bits."""
    key_of = lambda n: (first + n) * BLOCK_K + number * plan.rows_of_producer
    rows_of = lambda n: InPages(tuple(plan.slots(work_tile, key_of(n), keys.tables)), plan.rows_of_page)

    def scale_of(n):
        scale = scale_of_row(keys.scales, rows_of(n).slots, jnp.int32(0), plan.rows_of_page)
        return scale, (work_tile.first_key - key_of(n), work_tile.stop - key_of(n))

    converting.convert_tiles(shared, keys.pages, 2 * pairs, number, rows_of, scale_of, plan)


def await_tile(shared: Any, keys: Keys, work_tile: WorkTile, tile: Array, pair: Array, stage: int, plan: Plan) -> Array:
    """Waits for a tile, and zeroes what no token sees; returns whether some token does not see all of its keys."""
    del keys, pair
    plgpu.barrier_wait(shared.k_full.at[stage])
    begin, end = work_tile.first_key - tile * BLOCK_K, work_tile.stop - tile * BLOCK_K
    has_invalid_slots = (begin > 0) | (end < BLOCK_K)
    pl.when(has_invalid_slots)(lambda: zero_rows(shared.k_latent.at[stage], begin, end))
    return has_invalid_slots | plan.cuts(work_tile, tile)


def hide_columns(s: Array, keys: Keys, work_tile: WorkTile, tile: Array, plan: Plan) -> Array:
    """The logits [rows, keys] of a tile, −∞ where a row does not see the key."""
    del keys
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    first, stop = plan.visible(work_tile, tile, row)
    ok = compare_columns("slt", stop, (ROWS, BLOCK_K))
    ok = ok if plan.left is None else ok & compare_columns("sge", first, (ROWS, BLOCK_K))
    return jnp.where(ok, s, -jnp.inf)


def hide_rows(s: Array, keys: Keys, work_tile: WorkTile, tile: Array, plan: Plan) -> Array:
    """The logits [keys, rows] of a tile, −∞ where a row does not see the key."""
    del keys
    row = plgpu.broadcasted_iota(jnp.int32, (plan.rows,), 0, layout=PER_COLUMN)
    first, stop = plan.visible(work_tile, tile, row)
    key = indices(jnp.int32(0), 0, (BLOCK_K, plan.rows))
    ok = key < broadcast_columns(stop, key)
    ok = ok if plan.left is None else ok & (key >= broadcast_columns(first, key))
    return jnp.where(ok, s, -jnp.inf)
