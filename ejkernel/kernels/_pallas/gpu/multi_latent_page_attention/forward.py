"""Absorbed latent attention over pages: one tile of shared memory holds the keys of all heads and their values.

A thread block has some rows, heads of tokens, and one part of the keys that they see. The producer copies tiles of 64
slots, page by page, into two stages. What two consumer warpgroups do with them is in seesaw.py for 64 rows, and for
fewer in transposed.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from .._inline.rows import TILE_COLUMNS
from .._launch import ROWS, launch, stage_of, sync
from .._launch import shared as swizzled_smem
from ..flash_attention.plan import REGISTERS
from ..ragged_page_attention.work import WorkTile, most_tiles, work_tiles
from . import seesaw, transposed
from .merge import merged
from .plan import BLOCK_K, HALF, K_EMPTY, STAGES, Plan

WARPGROUPS = 3


def multi_latent_page_attention(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Outputs:
    """o [b,t,h,c] and lse [b,t,h] of a step, from one launch and, with splits of keys, the merge of these."""
    plan, (B, T, H, R) = plan_of(x, spec, config), x.q_latent.shape
    table, total = work_tiles(
        x.context_lens, x.query_start_loc, x.num_seqs, T, plan.tokens, 1, plan.left, plan.columns * plan.page
    )
    rows, dtype = B * T * H, x.q_latent.dtype
    of_parts = dtype if plan.splits == 1 else jnp.dtype(jnp.float32)
    o, lse = launch(
        partial(_kernel, plan=plan),
        "multi_latent_page_attention",
        (
            x.q_latent.reshape(rows, R),
            x.q_rope.reshape(rows, plan.D),
            x.pages.reshape(-1, R + plan.D),
            x.block_tables.reshape(B * plan.sequences, plan.columns),
            table,
            total,
        ),
        out_type=(
            jax.ShapeDtypeStruct((plan.splits * rows, 2, HALF), of_parts),
            jax.ShapeDtypeStruct((plan.splits * rows, 2), jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=WARPGROUPS,
        scratch=dict(
            q=_q_tiles(plan, dtype),
            k_latent=swizzled_smem((STAGES, BLOCK_K, R), dtype),
            k_rope=swizzled_smem((STAGES, BLOCK_K, plan.D), dtype),
            q_full=plgpu.Barrier(num_arrivals=plan.parts),
            k_full=plgpu.Barrier(num_barriers=STAGES, num_arrivals=2 * plan.copies),
            **_consumers(plan).scratch(plan, dtype),
        ),
    )
    return merged(o, lse, x, plan)


def plan_of(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Plan:
    """The plan of a step (arrays or shapes)."""
    (B, T, H, R), (pools, pages, page, _), (_, N, J) = x.q_latent.shape, x.pages.shape, x.block_tables.shape
    block = config.heads_per_block
    tokens = max(1, min(config.queries_per_block, block // H))
    return Plan(
        H, R, x.q_rope.shape[3], N, pages, page, pools, J, block, tokens, spec.num_splits or config.num_splits,
        min(most_tiles(B, N, T, tokens), B * T), spec.left, spec.softmax_scale, spec.softcap,
    )  # fmt: skip


def _consumers(plan: Plan) -> Any:
    """The module of the consumer warpgroups."""
    return seesaw if plan.rows == ROWS else transposed


def _q_tiles(plan: Plan, dtype: Any) -> plgpu.RefUnion:
    """The parts of q as products read them, and as they are copied.

    TMA copies tiles of 8 rows only from arrays of a multiple of 8 rows.
    """
    of_part, swizzle = (1, plan.rows, TILE_COLUMNS), plgpu.SwizzleTransform(128)
    return plgpu.RefUnion(
        tuple(swizzled_smem(of_part, dtype) for _ in range(plan.parts)),
        tuple(plgpu.SMEM(of_part, dtype, transforms=(swizzle,)) for _ in range(plan.parts)),
    )


def _kernel(q_latent, q_rope, pages, block_tables, table, total, o, lse, *, plan: Plan, **scratch):
    consumers = _consumers(plan)
    number, shared = lax.axis_index("warpgroup"), consumers.Shared(**scratch)
    index, part, heads = plan.place()

    def work():
        work_tile = plan.work_tile(index, table)
        first, pairs = plan.tiles_of_keys(work_tile, part)
        row = work_tile.token * plan.H + heads * plan.rows
        consume = partial(consumers.consume, shared, o, lse, work_tile, first, pairs, row, part, heads, plan)
        produce = partial(_produce, shared, q_latent, q_rope, pages, block_tables, work_tile, first, pairs, row, plan)
        lax.cond(number < 2, lambda: lax.cond(number == 0, partial(consume, 0), partial(consume, 1)), produce)

    pl.when(index < total[0])(work)


def _produce(
    shared: Any, q_latent, q_rope, pages, block_tables, work_tile: WorkTile, first: Array, pairs: Array, row: Array,
    plan: Plan,
) -> None:  # fmt: skip
    """The producer warpgroup: q, and the tiles of keys into the stages as they become empty."""
    plgpu.set_max_registers(REGISTERS[2][1], action="decrease")
    _, parts = shared.q
    for part, target in enumerate(parts):
        source, column = (q_latent, part * TILE_COLUMNS) if part < plan.parts - 1 else (q_rope, 0)
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(row, plan.rows), pl.ds(column, TILE_COLUMNS)], target.at[0], shared.q_full
        )

    def load_tile(n, carry):
        stage = stage_of(n, STAGES)
        slots = plan.slots(work_tile, first + n, block_tables)
        sync(K_EMPTY + stage, plan.warpgroups_of_stage)
        for copy, slot in enumerate(slots):
            rows, to = pl.ds(slot, plan.rows_of_page), pl.ds(copy * plan.rows_of_page, plan.rows_of_page)
            full = shared.k_full.at[stage]
            plgpu.copy_gmem_to_smem(pages.at[rows, pl.ds(0, plan.R)], shared.k_latent.at[stage, to], full)
            plgpu.copy_gmem_to_smem(pages.at[rows, pl.ds(plan.R, plan.D)], shared.k_rope.at[stage, to], full)
        return carry

    lax.fori_loop(0, 2 * pairs, load_tile, jnp.int32(0))
