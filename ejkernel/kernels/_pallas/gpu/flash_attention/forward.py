"""The forward kernel: softmax(s)·v by the online softmax, with lse, after FlashAttention-3 (arXiv 2407.08608).

Of row i, after the blocks of keys seen so far:  m = max_j s_j,  l = Σ_j exp(s_j − m),  acc = Σ_j exp(s_j − m)·v_j. A
block with a maximum m' > m rescales l and acc by exp(m − m'). At the end o = acc / l and lse = m + log l for any m for
which no exp(s_j − m) is out of range. So m is taken from the first block of a tile, and the maximum of a later block is
computed only where its row sums exceed a limit (`tiles.updated`), which is rare.

A work tile of queries belongs to two or three consumer warpgroups, 64 rows each. A warpgroup issues q·kᵀ of one block
and p·v of the block before together, and computes the softmax of the former when both are complete: its p reuses the
registers of the previous p. Consumers issue products alternately (ping-pong), so that one computes a softmax while
another keeps the tensor cores busy. Blocks of keys are taken from the last to the first, so that those that need a
causal mask come first.

Where shared memory has space for o beside q and the next q, the tile scheduler is persistent, and q·kᵀ of the first
block of a work tile overlaps the last p·v of the tile before. Otherwise there is a thread block for each work tile. Of
packed sequences, segments and lists of blocks the device alone knows what a work tile costs: thread blocks then take
their work tiles from a queue, one after the other (work_tiles.py).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels._sequences import of_sequences
from ejkernel.kernels._visibility import Visibility, visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._inline.rows import store_tile
from .._launch import PER_ROW, ROWS, WGMMA, broadcast_rows, either, full, launch, shared, stage_of, sync, whole_eights
from .configs import SHARED_BYTES, blocks_of_keys, check, has_pairs, in_e4m3
from .consumer_tile import ConsumerTile, Shared
from .feature_tiles import Tiles, load_parts, tiles_of, union, views
from .head_dims import ROW_WIDTHS, parts_of
from .hidden_rows import load_visible
from .mainloop import consume
from .mask_info import MaskInfo, fully_masked, mask_info_of, with_hidden_columns, zero_hidden_keys
from .pairs import Pairs, pairs_of, scratch_of_bias
from .plan import Q_EMPTY, REGISTERS, Plan
from .problem import LOG2_E, problem_of, scale_of_heads
from .quantized import Scales, hadamard_size, rotated
from .rounding import rounded
from .tiles import COLUMNS, Statistics, View
from .work_tiles import TileQueue, WorkTile, numbered, scratch_of_queue, table_of


def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec, config: KernelConfig, k_rope: Array | None = None
) -> Outputs:
    """o and lse. With `k_rope` [b,t,y] k has only the features before these, which the keys of all heads share."""
    operands = Operands(*operands)
    check("flash_attention", config, block_k=blocks_of_keys(operands.v.shape[3], has_pairs(operands)))
    mask_info = mask_info_of(visibility_of(operands, spec), config.block_q, config.block_k)
    return attention(operands, spec, config, mask_info, k_rope)


def takes_rope(operands: Operands, features: int, spec: FlashAttentionSpec) -> bool:
    """Whether the last features of k may be given as `k_rope`: TMA copies them to rows of their own."""
    return operands.k.shape[3] % ROW_WIDTHS[-1] == 0 == features % ROW_WIDTHS[-1] and not in_e4m3(operands, spec)


def attention(
    operands: Operands, spec: FlashAttentionSpec, config: KernelConfig, mask_info: MaskInfo | None,
    k_rope: Array | None = None,
) -> Outputs:  # fmt: skip
    """o and lse; `mask_info` is the mask of arrays, applied on top of the band."""
    visibility, problem = visibility_of(operands, spec), problem_of(operands, spec, k_rope)
    listed = mask_info is not None and mask_info.block_lists is not None
    given = in_e4m3(operands, spec), listed, operands.bias is not None, operands.mask is not None
    plan = Plan(problem, config.block_q, config.block_k, config.num_stages, *given)
    if (size := plan.shared_bytes(plan.persistent)) > SHARED_BYTES:
        blocks = f"{plan.block_q} queries and {plan.block_k} keys in {plan.stages} stages"
        raise ValueError(f"flash_attention: {blocks} take {size} bytes of shared memory; there are {SHARED_BYTES}")
    sinks = operands.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(jax.nn.logsumexp(sinks, axis=-1) * LOG2_E, (problem.B, problem.H))
    mask_info, k, v = _without_hidden(operands, visibility, mask_info, plan)
    arrays, scales = tuple(map(whole_eights, (operands.q, k, v))), None
    longest_first, dtype, stages = table_of(mask_info, plan), problem.dtype, plan.stages
    softmax_scale = scale_of_heads(operands, spec)
    if plan.e4m3:
        arrays, scales, softmax_scale = *_in_e4m3(arrays, softmax_scale, plan), None
    tile_dtype = arrays[0].dtype
    D_parts, V_parts = problem.D_parts, parts_of(problem.V)
    q = views((plan.q_stages, plan.block_q), D_parts, tile_dtype)
    o = views((plan.consumers, ROWS), V_parts, dtype)
    k = views((stages, plan.block_k), D_parts, tile_dtype)
    v = views((stages, plan.block_k), V_parts, tile_dtype, plan.values_widest)
    if plan.e4m3:
        v = ((shared((stages, problem.V, plan.block_k), tile_dtype),),)
    q_copies, v_copies = len(D_parts), len(V_parts)
    o, lse = launch(
        partial(_kernel, plan=plan),
        "flash_attention_forward",
        (
            arrays,
            None if k_rope is None else whole_eights(k_rope),
            longest_first,
            jax.new_ref(jnp.zeros((1,), jnp.int32)) if plan.queued else None,
            sinks,
            softmax_scale,
            scales,
            mask_info,
            pairs_of(operands, plan),
        ),
        out_type=(
            jax.ShapeDtypeStruct((problem.B, -(-problem.S // 8) * 8, problem.H, problem.V), dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, plan.q_tiles * plan.block_q), jnp.float32),
        ),
        blocks=plan.scheduler.blocks,
        warpgroups=plan.warpgroups,
        scratch=dict(
            q_and_o=(union(*q), union(*o)) if plan.persistent else union(*q, *o),
            k_tiles=union(*k),
            v_tiles=union(*v),
            lse_tile=plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_barriers=plan.q_stages, num_arrivals=q_copies),
            k_full=plgpu.Barrier(num_barriers=stages, num_arrivals=q_copies),
            v_full=plgpu.Barrier(num_barriers=stages, num_arrivals=v_copies),
            q_empty=plgpu.Barrier(num_barriers=plan.q_stages, num_arrivals=plan.consumers),
            **scratch_of_bias(operands.bias, plan),
            **scratch_of_queue(plan),
            **(dict(landed=plgpu.Barrier(num_arrivals=v_copies)) if plan.zeroes_hidden else {}),
        ),
    )
    return Outputs(o[:, : problem.S], of_sequences(lse[:, :, : problem.S], operands))


def _without_hidden(operands: Operands, visibility: Visibility, mask_info: MaskInfo | None, plan: Plan) -> tuple:
    """The mask with what the producer overwrites with zeros, k, and v; or k and v with zeros."""
    if plan.zeroes_hidden:
        mask_info = with_hidden_columns(mask_info, fully_masked(visibility.transposed()), plan.block_k)
        return mask_info, operands.k, operands.v
    k, v = zero_hidden_keys(visibility, operands.k if plan.e4m3 else None, operands.v)
    return mask_info, k if plan.e4m3 else operands.k, v


def _in_e4m3(arrays: tuple, softmax_scale: Array | None, plan: Plan) -> tuple[tuple, Scales]:
    """q, k and v in e4m3, and their scales, of which softmax_scale becomes a part."""
    q, k, v = arrays
    if softmax_scale is not None:
        q = q * jnp.sign(softmax_scale).astype(q.dtype)[:, None, :, None]
    arrays, scales = rounded(rotated(q), rotated(k), v, plan.block_q, plan.block_k)
    of_queries = scales.queries * hadamard_size(plan.problem.D)
    if softmax_scale is not None:
        of_queries *= jnp.abs(softmax_scale)[:, :, None]
    return arrays, scales._replace(queries=of_queries)


def _kernel(
    arrays, k_rope, longest_first, counter, sinks, softmax_scale, scales: Scales | None, mask_info: MaskInfo | None,
    pairs: Pairs | None, o, lse, *, plan: Plan, q_and_o, k_tiles, v_tiles, lse_tile, q_full, k_full, v_full, q_empty,
    bias_tiles=None, bias_full=None, slots=None, slot_full=None, taken=None, landed=None,
):  # fmt: skip
    number = lax.axis_index("warpgroup")
    if plan.queued:
        work_tiles = TileQueue(plan, counter, longest_first, mask_info, slots, slot_full, taken)
        work_tile_of = work_tiles.tile
    else:
        work_tiles, work_tile_of = plan.work_tiles(longest_first), partial(numbered, longest_first, mask_info, plan)
    if not plan.persistent:
        of_q = len(views((), plan.problem.D_parts, plan.problem.dtype))
        q_and_o = tuple(q_and_o)[:of_q], tuple(q_and_o)[of_q:]
    q_tiles, o_tiles, k_tiles, v_tiles = map(tiles_of, (*q_and_o, k_tiles, v_tiles))
    bias_tiles = tiles_of(bias_tiles) if plan.bias else None
    tiles = Shared(q_tiles, k_tiles, v_tiles, q_full, k_full, v_full, q_empty, bias_tiles, bias_full)
    given = work_tile_of, sinks, softmax_scale, scales, mask_info, pairs
    tile_of = partial(_tile_of, q_tiles, given, number, plan)
    store = partial(_store, (o, lse), (o_tiles, lse_tile), scales, number, plan)

    def compute():
        consume(tiles, tile_of, store, number, work_tiles, plan)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    load = partial(_load, arrays, k_rope, work_tile_of, tiles, work_tiles, mask_info, pairs, landed, plan)
    either(number < plan.consumers, compute, load)


def _tile_of(q_tiles: Tiles, arrays: tuple, number: Array, plan: Plan, work_tile: Array) -> ConsumerTile:
    """The rows that this warpgroup has of the n-th work tile of its thread block."""
    work_tile_of, sinks, softmax_scale, scales, mask_info, pairs = arrays
    first, head, batch, block_range, _ = work_tile_of(work_tile)
    maximum, total = -jnp.inf, 0.0
    if sinks is not None:
        sink = sinks[batch, head]
        maximum = plan.limits.maximum(sink)
        total = jnp.where(sink == -jnp.inf, 0.0, jnp.exp2(sink - maximum + plan.limits.p_scale_log2) / COLUMNS)
    return ConsumerTile(
        number=number,
        q=[part.at[stage_of(work_tile, plan.q_stages), pl.ds(number * ROWS, ROWS)] for part in q_tiles.parts],
        view=View(batch, first + number * ROWS, mask_info),
        head=head,
        block_range=block_range(),
        block=lambda n: plan.block(n, first, head, batch, mask_info),
        start=Statistics(full((ROWS,), maximum, PER_ROW), full((ROWS, COLUMNS), total, WGMMA)),
        units=plan.units(scales, batch, head, first),
        pairs=pairs,
        softmax_scale=None if softmax_scale is None else softmax_scale[batch, head],
    )


def _store(
    out: tuple, tiles: tuple, scales: Scales | None, number: Array, plan: Plan,
    work_tile: Array, tile: ConsumerTile, acc: Array, last: Statistics,
) -> None:  # fmt: skip
    """The epilogue: stores o = acc / l and lse of a warpgroup's rows, through shared memory, by TMA."""
    del work_tile
    (o, lse), (o_tiles, lse_tile) = out, tiles
    if plan.persistent:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    elif plan.problem.D_parts != parts_of(plan.problem.V) or plan.e4m3:
        sync(Q_EMPTY, plan.consumers)  # o lies over q of the other warpgroup
    batch, first = tile.view.batch, tile.view.row
    total = last.total.sum(axis=1)
    saw = total > 0
    total = jnp.where(saw, total, 1.0)
    factor = (1.0 if scales is None else scales.values[tile.units.head]) / total
    rows_of_o = (acc * broadcast_rows(factor, acc)).astype(plan.problem.dtype)
    for part, columns in zip(o_tiles.parts, o_tiles.columns, strict=True):
        store_tile(part.at[number], rows_of_o[:, columns])
    lse_tile[number] = jnp.where(
        saw, (last.maximum + (jnp.log2(total) - plan.limits.p_scale_log2)) * (1 / LOG2_E), -jnp.inf
    )
    plgpu.commit_smem()
    rows = pl.ds(first, ROWS)
    for part, features in zip(o_tiles.copies, o_tiles.copied(plan.problem.V), strict=True):
        target = o.at[batch, rows, tile.head, features]
        plgpu.copy_smem_to_gmem(part.at[number], target, commit_group=False)
    plgpu.copy_smem_to_gmem(lse_tile.at[number], lse.at[batch, tile.head, rows], commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def _load(
    arrays, k_rope, work_tile_of: Callable[[Array], WorkTile], tiles: Shared, work_tiles: Array | TileQueue,
    mask_info: MaskInfo | None, pairs: Pairs | None, landed: Any, plan: Plan,
) -> None:  # fmt: skip
    """The producer warpgroup: q of every work tile, and its blocks of k and v into the stages as they become empty."""
    q, k, v = arrays
    plgpu.set_max_registers(REGISTERS[plan.consumers][1], action="decrease")

    def one(work_tile, step):
        first, head, batch, block_range, hides = work_tile_of(work_tile)
        kv_head = lax.div(head, np.int32(plan.problem.group))
        block_range, hides = block_range(), hides()
        stage = stage_of(work_tile, plan.q_stages)
        pl.when(work_tile >= plan.q_stages)(lambda: plgpu.barrier_wait(tiles.q_empty.at[stage]))
        rows = pl.ds(first, plan.block_q)
        load_parts(tiles.q, stage, lambda part: q.at[batch, rows, head, part], plan.problem.D, tiles.q_full.at[stage])

        def stream(i, step):
            stage = stage_of(step, plan.stages)
            block = plan.block(block_range.end - 1 - i, first, head, batch, mask_info)
            keys = pl.ds(block * plan.block_k, plan.block_k)
            of_keys = partial(_keys, k, k_rope, batch, keys, kv_head)
            sync(plan.k_empty + stage, plan.warpgroups)
            load_parts(tiles.k, stage, of_keys, plan.problem.D, tiles.k_full.at[stage])
            sync(plan.v_empty + stage, plan.warpgroups)
            if plan.bias:
                of_bias = pairs.tile_of_bias(batch, head, rows, keys)
                plgpu.copy_gmem_to_smem(of_bias, tiles.bias.copies[0].at[stage], tiles.bias_full.at[stage])
            v_full = tiles.v_full.at[stage]
            if plan.e4m3:  # of which the keys are innermost, in one part
                plgpu.copy_gmem_to_smem(v.at[batch, kv_head, :, keys], tiles.v.parts[0].at[stage], v_full)
            else:
                of_values = lambda part: v.at[batch, keys, kv_head, part]
                masked = mask_info and mask_info.hidden_columns
                hidden = masked and masked.of_streamed_block(hides, batch, block)
                of_stage = tiles.v, stage, of_values, plan.problem.V, v_full
                load_visible(hidden, masked, batch, keys.start, landed, *of_stage)
            return step + 1

        return lax.fori_loop(0, block_range.end - block_range.begin, stream, step)

    if not plan.queued:
        lax.fori_loop(0, work_tiles, one, jnp.int32(0))
        return

    def load_and_take(state):
        n, _, step = state
        number = work_tiles.take()  # while this work tile is loaded
        step = one(n, step)
        return n + 1, work_tiles.pass_on(n + 1, number), step

    has_tile = work_tiles.pass_on(jnp.int32(0), lax.axis_index("block"))
    lax.while_loop(lambda state: state[1], load_and_take, (jnp.int32(0), has_tile, jnp.int32(0)))


def _keys(k, k_rope, batch: Array, keys: pl.Slice, head: Array, part: pl.Slice):
    """Some features of keys in device memory."""
    features = k.shape[3]
    if k_rope is None or part.start < features:
        return k.at[batch, keys, head, part]
    return k_rope.at[batch, keys, pl.ds(part.start - features, part.size)]
