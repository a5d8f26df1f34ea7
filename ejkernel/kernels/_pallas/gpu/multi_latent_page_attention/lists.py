"""Lists of keys, as DeepSeek's sparse attention has them: each token is a work tile, whose keys are those in its list.

The producer gathers their rows from the pool, and zeros for entries that are no keys. Which entries are keys the
consumers read from bits.
"""

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._triton.multi_latent_page_attention.rows import in_words, step_of_lists
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands

from .._inline import gather
from .._inline.conversion import scale_of_entry
from .._inline.converted_rows import InList
from .._inline.registers import BITS, where_bits
from .._launch import PER_ROW, ROWS, broadcast_rows, full, load_vector, stage_of
from ..ragged_page_attention.work import WorkTile
from . import converting
from .plan import BLOCK_K, K_EMPTY, STAGES, Keys, Plan

WORDS = BLOCK_K // BITS  # of a tile


def keys_of_step(x: Operands, spec: CacheSpec, plan: Plan) -> Keys:
    """The lists as slots of all pools, −1 for no key, in whole pairs of tiles; their bits; and the work tiles."""
    step, x = step_of_lists(x, spec)
    pool = jnp.arange(plan.pools, dtype=jnp.int32)[:, None, None] * plan.pages
    slots = jnp.where(x.block_tables < 0, -1, x.block_tables + pool)
    slots = jnp.pad(slots, ((0, 0), (0, 0), (0, plan.columns - slots.shape[2])), constant_values=-1)
    slots, stop = slots.reshape(-1, plan.columns), step.stop.reshape(-1)
    token, zero = jnp.arange(len(stop), dtype=jnp.int32), jnp.zeros_like(stop)
    tiles = WorkTile(token, zero + 1, position=zero + plan.columns, sequence=token, first_key=zero, stop=stop)
    total = jnp.full((1,), len(stop), jnp.int32)
    scales = None if x.k_scale is None else x.k_scale.reshape(-1, 1)
    return Keys(x.pages.reshape(-1, plan.R + plan.D), slots, in_words(slots >= 0), scales, jnp.stack(tiles, 1), total)


def barriers(plan: Plan) -> Any:
    """An mbarrier of 64 bits for each stage, which counts the threads that have copied their parts of a tile."""
    del plan
    return plgpu.SMEM((STAGES, 2), jnp.int32)


def load_tiles(shared: Any, keys: Keys, work_tile: WorkTile, first: Array, pairs: Array, plan: Plan) -> None:
    """The producer: tiles of listed keys into the stages as they become empty."""

    def load_tile(n, carry):
        stage = stage_of(n, STAGES)
        targets = shared.k_latent.at[stage], shared.k_rope.at[stage]
        row, column, empty = work_tile.sequence, (first + n) * BLOCK_K, K_EMPTY + stage
        gather.gather_rows(
            keys.pages, keys.tables, row, column, targets, shared.k_full, stage, empty, plan.warpgroups_of_stage
        )
        return carry

    lax.fori_loop(0, 2 * pairs, load_tile, jnp.int32(0))


def convert_tiles(
    shared: Any, keys: Keys, work_tile: WorkTile, first: Array, pairs: Array, number: Array, plan: Plan
) -> None:
    """Producer `number`: its rows of tiles of eight bits."""
    entry_of = lambda n: (first + n) * BLOCK_K + number * plan.rows_of_producer
    rows_of = lambda n: InList(keys.tables, work_tile.sequence, entry_of(n))

    def scale_of(n):
        return scale_of_entry(keys.scales, keys.tables, work_tile.sequence, entry_of(n), plan.rows_of_producer), None

    converting.convert_tiles(shared, keys.pages, 2 * pairs, number, rows_of, scale_of, plan)


def await_tile(shared: Any, keys: Keys, work_tile: WorkTile, tile: Array, pair: Array, stage: int, plan: Plan) -> Array:
    """Waits for a tile; returns whether some of its entries are no keys."""
    is_all = reduce(jnp.bitwise_and, _words(keys, work_tile, tile)) == -1
    if plan.converts:
        plgpu.barrier_wait(shared.k_full.at[stage])
    else:
        gather.await_rows(shared.k_full, stage, lax.rem(pair, jnp.int32(2)))
        plgpu.commit_smem()
    return ~is_all


def hide_columns(s: Array, keys: Keys, work_tile: WorkTile, tile: Array, plan: Plan) -> Array:
    """The logits [rows, keys] of a tile, −∞ where an entry is no key."""
    del plan
    return where_bits([full((ROWS,), word, PER_ROW, jnp.int32) for word in _words(keys, work_tile, tile)], s)


def hide_rows(s: Array, keys: Keys, work_tile: WorkTile, tile: Array, plan: Plan) -> Array:
    """The logits [keys, rows] of a tile, −∞ where an entry is no key."""
    del plan
    entries = keys.tables.at[work_tile.sequence, pl.ds(tile * BLOCK_K, BLOCK_K)]
    return jnp.where(broadcast_rows(load_vector(entries, PER_ROW, optimized=False), s) >= 0, s, -jnp.inf)


def _words(keys: Keys, work_tile: WorkTile, tile: Array) -> list[Array]:
    """The bits of a tile."""
    return [keys.bits[work_tile.sequence, WORDS * tile + n] for n in range(WORDS)]
