"""Absorbed latent attention over pages: one tile of shared memory holds the keys of all heads and their values.

A thread block has some rows, heads of tokens, and one part of the keys that they see. The producer copies tiles of 64
slots into two stages, page by page (pages.py), or slot by slot where a token has a list of them (lists.py). What two
consumer warpgroups do with them is in seesaw.py for 64 rows, and for fewer in transposed.py.
"""

import math
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

from .._inline import gather
from .._inline.rows import TILE_COLUMNS
from .._launch import ROWS, launch, sync
from .._launch import shared as swizzled_smem
from ..ragged_page_attention.work import most_tiles
from . import converting, lists, pages, seesaw, transposed
from .drafts import with_drafts
from .merge import merged
from .plan import BLOCK_K, CONSUMERS, HALF, READY, STAGES, Keys, Plan


def multi_latent_page_attention(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Outputs:
    """o [b,t,h,c] and lse [b,t,h] of a step, from one launch and, with splits of keys, the merge of these."""
    plan, (B, T, H, R) = plan_of(x, spec, config), x.q_latent.shape
    source = _source(plan)
    keys = source.keys_of_step(x, spec, plan)
    rows, dtype = B * T * H, x.q_latent.dtype
    of_parts = dtype if plan.splits == 1 else jnp.dtype(jnp.float32)
    o, lse = launch(
        partial(_kernel, plan=plan),
        "multi_latent_page_attention",
        (x.q_latent.reshape(rows, R), x.q_rope.reshape(rows, plan.D), keys),
        out_type=(
            jax.ShapeDtypeStruct((plan.splits * rows, 2, HALF), of_parts),
            jax.ShapeDtypeStruct((plan.splits * rows, 2), jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=CONSUMERS + plan.producers,
        scratch=dict(
            q=_q_tiles(plan),
            k_latent=swizzled_smem((STAGES, BLOCK_K, R), plan.dtype_of_products),
            k_rope=swizzled_smem((STAGES, BLOCK_K, plan.D), plan.dtype_of_products),
            q_full=plgpu.Barrier(num_arrivals=plan.parts),
            k_full=(converting if plan.converts else source).barriers(plan),
            **(dict(k_scales=plgpu.SMEM((STAGES, BLOCK_K), jnp.float32)) if plan.scales_slots else {}),
            **(dict(q_factors=plgpu.SMEM((plan.rows,), jnp.float32)) if plan.rounds_queries else {}),
            **_consumers(plan).scratch(plan),
        ),
    )
    found = merged(o, lse, x, plan)
    return found if plan.lists or x.draft_mask is None else with_drafts(found, x, spec)


def plan_of(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Plan:
    """The plan of a step (arrays or shapes)."""
    (B, T, H, R), (pools, P, page, _), (_, N, J) = x.q_latent.shape, x.pages.shape, x.block_tables.shape
    block, has_lists = config.heads_per_block, x.indices is not None
    tokens = max(1, min(1 if has_lists else config.queries_per_block, block // H))
    if has_lists:
        N, P, page, J = T, P * page, 1, math.ceil(x.indices.shape[2] / (2 * BLOCK_K)) * 2 * BLOCK_K
    return Plan(
        H, R, x.q_rope.shape[3], N, P, page, pools, J, has_lists,
        x.pages.dtype.itemsize == 1, x.k_scale is not None and x.k_scale.shape[:3] != (1, 1, 1), x.q_latent.dtype,
        block, tokens,
        spec.num_splits or config.num_splits, B * T if has_lists else min(most_tiles(B, N, T, tokens), B * T),
        spec.left, spec.softmax_scale, spec.softcap,
    )  # fmt: skip


def _source(plan: Plan) -> Any:
    """The module of where the keys come from."""
    return lists if plan.lists else pages


def _consumers(plan: Plan) -> Any:
    """The module of the consumer warpgroups."""
    return seesaw if plan.rows == ROWS else transposed


def _q_tiles(plan: Plan) -> plgpu.RefUnion:
    """The parts of q as products read them, and as they are copied.

    TMA copies tiles of 8 rows only from arrays of a multiple of 8 rows.
    """
    of_part, swizzle = (1, plan.rows, TILE_COLUMNS), plgpu.SwizzleTransform(128)
    return plgpu.RefUnion(
        tuple(swizzled_smem(of_part, plan.dtype_of_products) for _ in range(plan.parts)),
        tuple(plgpu.SMEM(of_part, plan.dtype, transforms=(swizzle,)) for _ in range(plan.parts)),
    )


def _kernel(q_latent, q_rope, keys: Keys, o, lse, *, plan: Plan, **scratch):
    consumers = _consumers(plan)
    number, shared = lax.axis_index("warpgroup"), consumers.Shared(**scratch)
    index, part, heads = plan.place()

    def work():
        work_tile = plan.work_tile(index, keys.work_tiles)
        first, pairs = plan.tiles_of_keys(work_tile, part)
        row = work_tile.token * plan.H + heads * plan.rows
        consume = partial(consumers.consume, shared, keys, o, lse, work_tile, first, pairs, row, part, heads, plan)

        def produce():
            plgpu.set_max_registers(plan.registers[1], action="decrease")
            load_q = partial(_load_q, shared, q_latent, q_rope, row, plan)
            load_q() if plan.producers == 1 else pl.when(number == CONSUMERS)(load_q)
            of_tiles = shared, keys, work_tile, first, pairs
            if plan.converts:
                _source(plan).convert_tiles(*of_tiles, number - CONSUMERS, plan)
            else:
                _source(plan).load_tiles(*of_tiles, plan)

        if plan.lists and not plan.converts:
            gather.init_barriers(shared.k_full)
            sync(READY, CONSUMERS + plan.producers)
        lax.cond(number < CONSUMERS, lambda: lax.cond(number == 0, partial(consume, 0), partial(consume, 1)), produce)

    pl.when(index < keys.total[0])(work)


def _load_q(shared: Any, q_latent, q_rope, row: Array, plan: Plan) -> None:
    _, parts = shared.q
    for part, target in enumerate(parts):
        source, column = (q_latent, part * TILE_COLUMNS) if part < plan.parts - 1 else (q_rope, 0)
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(row, plan.rows), pl.ds(column, TILE_COLUMNS)], target.at[0], shared.q_full
        )
