"""The prefills of a step over pages: the forward of flash_attention, with keys copied page by page.

The consumers, their mainloop and its numbers are those of the dense kernel. A work tile has tokens of one sequence,
each with some of the heads that share its keys, up to block_q rows in all (work.py), so that few tokens fill it; where
a step has few tiles, each has a split of the keys, and the splits are merged. The producer reads the page numbers of a
block of keys from the block table, and copies each page into its rows of the stage; all copies arrive at the full
barrier of the stage. Pages of eight bits are converted by another warpgroup (producer.py), and their scales are factors
of the logits and of o.

Slots outside of the context may hold NaN, so the consumers zero their values before the product: in the last block of a
sequence, and in the first block of its window.

o is stored from registers, row by row, because the rows after a work tile belong to other sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton._paged.drafts import causal_drafts, in_words
from ejkernel.kernels._triton._paged.parts import merge_parts
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands

from .._inline.rows import store_rows, zero_rows
from .._launch import PER_ROW, ROWS, WGMMA, broadcast_rows, full, launch, shared, stage_of
from ..flash_attention.consumer_tile import ConsumerTile, Shared
from ..flash_attention.feature_tiles import Tiles, tiles_of
from ..flash_attention.mainloop import consume
from ..flash_attention.problem import LOG2_E, Problem
from ..flash_attention.tiles import COLUMNS, Statistics, View
from . import MOST_KEYS_OF_TILE, blocks_of, least_decodes, packed_heads, varies_over_slots
from .idle import pass_over
from .plan import PagedPlan
from .producer import PageTiles, convert, load
from .work import WorkTile, most_tiles, work_tiles

LEAST_KEYS_OF_SPLIT = 1024
EVERY = 2**30
"""More keys than there are."""


def prefill(x: Operands, spec: CacheSpec, most: int) -> tuple[dict[str, Array], Array | None]:
    """o [b,t,h,d] and lse [b,t,h] float32 of all tokens, except in sequences of 1 to `most` tokens, the decodes.

    Where a mask says who sees drafts, they are those of the keys before them: the cached ones, and those of the step
    that are seen as without it. Decodes of up to so many keys [1] as the second result says, if there is one, are
    computed too.
    """
    plan, decodes = plan_of(x, spec), least_decodes(x, spec, gpu_target()) if most else None
    problem, (B, T, H, D) = plan.problem, x.q.shape
    of_step = None
    if plan.has_drafts:
        of_step = causal_drafts(in_words(x.draft_mask), x.query_start_loc, x.num_seqs)
    table, total, tiled_keys = work_tiles(
        x.context_lens, x.query_start_loc, x.num_seqs, T, plan.tokens, most + 1,
        None if problem.low is None else -problem.low, problem.K,
        *((MOST_KEYS_OF_TILE, decodes) if decodes else ()), of_step=of_step,
    )  # fmt: skip
    sinks = x.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(jax.nn.logsumexp(sinks, axis=-1) * LOG2_E, (B, H))
    row = plgpu.SwizzleTransform(plan.row_width * problem.dtype.itemsize)
    rows_of = lambda *shape: plgpu.SMEM((*shape, plan.row_width), problem.dtype, transforms=(row,))
    parts, stages, arrivals = D // plan.row_width, plan.stages, 1 if plan.converts else plan.pages_per_block
    of_splits = plan.splits * B * T, H
    of_token = (plan.packed_heads,) if plan.packed_heads > 1 else ()
    o, lse = launch(
        partial(_kernel, plan=plan),
        "ragged_page_attention_prefill",
        (
            x.q.reshape(B * T, H, D),
            x.kv_pages.reshape(-1, 2 * problem.G, D),
            x.block_tables.reshape(B * plan.sequences, plan.columns),
            table,
            total,
            tiled_keys,
            sinks,
            tuple(_scale_of_heads(scale) for scale in (x.k_scale, x.v_scale)),
            tuple(_scale_of_slots(scale) for scale in (x.k_scale, x.v_scale)),
        ),
        out_type=(
            jax.ShapeDtypeStruct((*of_splits, D), problem.dtype if plan.splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct(of_splits, jnp.float32),
        ),
        blocks=plan.blocks,
        warpgroups=plan.warpgroups + plan.converts,
        scratch=dict(
            q_tiles=plgpu.RefUnion(
                tuple(shared((plan.q_stages, plan.block_q, plan.row_width), problem.dtype) for _ in range(parts)),
                tuple(rows_of(plan.q_stages, plan.tokens, *of_token) for _ in range(parts)),
            ),
            k_tiles=shared((stages, plan.block_k, D), problem.dtype),
            v_tiles=shared((stages, plan.block_k, D), problem.dtype),
            q_full=plgpu.Barrier(num_barriers=plan.q_stages, num_arrivals=parts),
            k_full=plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
            v_full=plgpu.Barrier(num_barriers=stages, num_arrivals=arrivals),
            q_empty=plgpu.Barrier(num_barriers=plan.q_stages, num_arrivals=plan.consumers),
            pages=_page_tiles(x, plan) if plan.converts else None,
        ),
    )
    if plan.splits > 1:
        o, lse = merge_parts(o.reshape(-1, D), lse.reshape(-1, 1), None, plan.splits, B * T * H, problem.dtype)
    return dict(o=o.reshape(x.q.shape), lse=lse.reshape(B, T, H)), tiled_keys


def _page_tiles(x: Operands, plan: PagedPlan) -> PageTiles:
    """What shared memory has of pages that are converted."""
    tiles = plgpu.SMEM((plan.page_stages, plan.block_k, plan.problem.D), x.kv_pages.dtype)
    scales = plgpu.SMEM((plan.scale_stages + plan.page_stages, plan.block_k), jnp.float32)
    full = [
        plgpu.Barrier(num_barriers=plan.page_stages, num_arrivals=plan.pages_per_block + varies_over_slots(scale))
        for scale in (x.k_scale, x.v_scale)
    ]
    empty = plgpu.Barrier(num_barriers=plan.page_stages)
    return PageTiles(tiles, tiles, *full, empty, empty, scales if plan.scales_slots else None)


def _scale_of_heads(scale: Array | None) -> Array | None:
    """Of [b?,1,1,g?] as [b?,g?]; None if slots have scales, or there is none."""
    return None if scale is None or varies_over_slots(scale) else scale.reshape(scale.shape[0], scale.shape[3])


def _scale_of_slots(scale: Array | None) -> Array | None:
    """Of [b?,p,s,g] as [slots,g]; None unless slots have scales."""
    return scale.reshape(-1, scale.shape[3]) if varies_over_slots(scale) else None


def plan_of(x: Operands, spec: CacheSpec) -> PagedPlan:
    """The plan of a step (arrays or shapes)."""
    (B, T, H, D), (pools, pages, page, G), (_, N, J) = x.q.shape, x.kv_pages.shape[:4], x.block_tables.shape
    (block_q, block_k, stages), heads = blocks_of(x, spec), packed_heads(x)
    problem = Problem(
        *(1, T, J * page, H, G, D, D, spec.softmax_scale, spec.softcap),
        low=None if spec.left is None else -spec.left, high=0, packed=False, segmented=False,
        dtype=np.dtype(x.q.dtype),
    )  # fmt: skip
    plan = PagedPlan(
        problem, block_q, block_k, stages, sequences=N, page=page, pages=pages, pools=pools, columns=J,
        most_tiles=most_tiles(B, N, T, block_q // heads), packed_heads=heads, has_drafts=x.draft_mask is not None,
        page_dtype=np.dtype(x.kv_pages.dtype), scales_slots=any(map(varies_over_slots, (x.k_scale, x.v_scale))),
    )  # fmt: skip
    return replace(plan, splits=spec.num_splits or (1 if spec.batch_invariant else _splits(plan, B, T)))


def _splits(plan: PagedPlan, batches: int, tokens: int) -> int:
    """So many that the work tiles of a step, with all of its tokens, are one for each multiprocessor at most.

    Where all sequences have as many tokens there are so many tiles; others have more, and fewer where some are decoded.
    """
    tiles = batches * max(-(-tokens // plan.tokens), plan.sequences) * plan.tiles_of_tokens
    return max(1, min(plan.processors // tiles, plan.problem.K // LEAST_KEYS_OF_SPLIT))


def _kernel(
    q, kv, block_tables, table, total, tiled_keys, sinks, scales, scales_of_slots, o, lse, *, plan: PagedPlan,
    q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, q_empty, pages,
):  # fmt: skip
    number, count = lax.axis_index("warpgroup"), plan.count(total[0])
    nth = lambda n: n if tiled_keys is None else plan.nth(n, count, tiled_keys[0] > 0)
    work_tile_of = lambda n: plan.work_tile(nth(n), table)
    tiles = Shared(
        tiles_of(q_tiles), _parts(k_tiles, plan.row_width), _parts(v_tiles, plan.columns_of_product),
        q_full, k_full, v_full, q_empty, k_scales=None if scales_of_slots[0] is None else pages.scales_of_keys(plan),
    )  # fmt: skip

    tile_of = partial(_tile_of, tiles, work_tile_of, sinks, scales[0], number, plan)
    store = partial(_store, (o, lse), work_tile_of, sinks, scales[1], number, plan)
    compute = lambda: consume(tiles, tile_of, store, number, count, plan)
    produce = lambda: load(q, kv, scales_of_slots, block_tables, work_tile_of, tiles, pages, count, plan)
    convert_pages = lambda: convert(work_tile_of, tiles, pages, scales_of_slots[1] is not None, count, plan)
    converting = lambda: lax.cond(number == plan.consumers, convert_pages, produce)
    others = converting if plan.converts else produce
    pl.when(count > 0)(lambda: lax.cond(number < plan.consumers, compute, others))


def _parts(tiles: Any, columns: int) -> Tiles:
    """Tiles of keys or values as parts of so many columns."""
    D = tiles.shape[-1]
    if columns >= D:
        return Tiles((tiles,), (tiles,))
    parts = [tiles.at[:, :, pl.ds(first, min(columns, D - first))] for first in range(0, D, columns)]
    return Tiles(tuple(parts), (tiles,))


def _tile_of(
    tiles: Shared, work_tile_of: Callable, sinks: Any, k_scale: Any, number: Array, plan: PagedPlan, work_tile: Array
) -> ConsumerTile:
    """The rows that this warpgroup has of the n-th work tile of its thread block."""
    of, head, split = work_tile_of(work_tile)
    maximum, total = full((ROWS,), -jnp.inf, PER_ROW), full((ROWS, COLUMNS), 0.0, WGMMA)
    if sinks is not None:
        batch, of_row = lax.div(of.sequence, jnp.int32(plan.sequences)), lax.rem(_rows(), jnp.int32(plan.packed_heads))
        for n in range(plan.packed_heads):
            maximum = jnp.where(of_row == n, sinks[batch, head + n], maximum)
        if plan.splits > 1:  # a sink counts once
            maximum = jnp.where(split == plan.splits - 1, maximum, -jnp.inf)
        total = broadcast_rows(jnp.where(maximum == -jnp.inf, 0.0, 1.0 / COLUMNS), total)

    position = _positions(of, split, number, plan)

    def zero_hidden(stage: Array, block: Array) -> None:
        hides, begin, end = plan.hides(of, block)
        pl.when(hides)(lambda: zero_rows(tiles.v.copies[0].at[stage], begin, end))

    tile = ConsumerTile(
        number=number,
        q=[part.at[stage_of(work_tile, plan.q_stages), pl.ds(number * ROWS, ROWS)] for part in tiles.q.parts],
        view=View(jnp.int32(0), position - _rows(), None, stop=of.stop if plan.has_drafts else None),
        head=head,
        block_range=plan.blocks_of_keys(of, split),
        start=Statistics(maximum, total),
        units=None,
        zero_hidden=zero_hidden,
        softmax_scale=_scale_of(k_scale, of, head, plan),
    )
    if plan.consumers == 1:
        return tile
    return tile._replace(computed=partial(pass_over, tiles, tile, of.tokens * plan.packed_heads <= number * ROWS, plan))


def _scale_of(scale: Any, of: WorkTile, head: Array, plan: PagedPlan) -> Array | None:
    """Of the keys or values that a work tile sees, if they have one."""
    if scale is None:
        return None
    batch = lax.div(of.sequence, jnp.int32(plan.sequences)) if scale.shape[0] > 1 else 0
    return scale[batch, lax.div(head, jnp.int32(plan.problem.group)) if scale.shape[1] > 1 else 0]


def _rows() -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)


def _positions(of: WorkTile, split: Array, number: Array, plan: PagedPlan) -> Array:
    """The positions of the tokens of a warpgroup's rows, before all keys in a split without any."""
    first = of.position
    if plan.splits > 1:
        first = jnp.where(plan.sees_nothing(of, split), -EVERY, first)
    return first + lax.div(_rows() + number * ROWS, jnp.int32(plan.packed_heads))


def _store(
    out: tuple,
    work_tile_of: Callable,
    sinks: Any,
    v_scale: Any,
    number: Array,
    plan: PagedPlan,
    work_tile: Array,
    tile: ConsumerTile,
    acc: Array,
    last: Statistics,
) -> None:
    """The epilogue: o = acc / l and lse of the rows of a warpgroup, from its registers to device memory."""
    del tile
    (o, lse), (of, head, split) = out, work_tile_of(work_tile)
    first = number * ROWS
    total = last.total.sum(axis=1)
    saw = total > 0
    if sinks is not None:  # tokens outside of every context have no sinks
        saw &= _positions(of, split, number, plan) >= 0
    total = jnp.where(saw, total, 1.0)
    factor = 1 / total
    if v_scale is not None:
        factor *= _scale_of(v_scale, of, head, plan)
    rows = (acc * broadcast_rows(factor, acc)).astype(o.dtype)
    of_rows = jnp.where(saw, (last.maximum + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
    token, heads = of.token + lax.div(first, jnp.int32(plan.packed_heads)), plan.packed_heads
    token += split * (o.shape[0] // plan.splits)
    store_rows(o, rows, token, of.tokens * heads - first, head, lse, of_rows, heads)
