"""The tangent kernel: o_dot and lse_dot in one pass over the tiles of a list, as in tangent.py of flash_attention.

With the weights p = exp(s − lse), p̃ the weights after dropout, o = p̃·v, and a number c for each row,

    s_dot = (scale·(q_dot·kᵀ + q·k_dotᵀ) + scale_dot·q·kᵀ + bias_dot) ∘ (1 − (s/softcap)²)
    lse_dot = Σ_j p ∘ s_dot + Σ_n exp(sink_n − lse)·sink_dot_n
    o_dot = (p̃ ∘ (s_dot − c))·v − (lse_dot − c)·o + p̃·v_dot
"""

import math

import jax
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import logits, masks
from ejkernel.kernels._triton.flash_attention import tiles as flash
from ejkernel.kernels._triton.flash_attention.configs import values_wait
from ejkernel.kernels._triton.flash_attention.problem import seen_lse
from ejkernel.kernels._triton.flash_attention.tangent import finished, first_sums, referred, summed
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from . import lists, tiles
from .call import call_of
from .fully_masked import zero_hidden_keys


def blocksparse_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: BlocksparseAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    """The tangents of o and lse."""
    call = call_of(primals, spec)
    problem, tile = call.problem, call.tile(config.block_q, config.block_k)
    blocks, of_keys = math.ceil(problem.S / tile[0]), call.lists_of_keys(tile)
    v, v_dot = zero_hidden_keys(call, primals.v, tangents.v)
    moving = (tangents.q, tangents.k, tangents.bias, tangents.softmax_scale)
    o_dot, lse_dot = _launch.launch(
        tangent_kernel,
        *call.with_arrays(v=v).arrays,
        call.segment_ranges(tile),
        *call.intervals,
        *of_keys,
        *(tangents.q, tangents.k, v_dot, tangents.bias, tangents.sinks, tangents.softmax_scale),
        outputs.o,
        seen_lse(outputs.lse),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        **of_keys.constants,
        EDGES=call.is_edged or problem.K % tile[1] != 0,
        CHECKED=call.checked(tile, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
        LOGITS_MOVE=any(x is not None for x in moving),
        VALUES_WAIT=values_wait(call.operands.attention, *tile, config.num_warps, config.num_stages),
    )
    return Outputs(o_dot, lse_dot)


@triton.jit
def tangent_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    segment_ranges, first_keys, stop_keys, order, counts, entries,
    q_dot, k_dot, v_dot, bias_dot, sinks_dot, scale_dot,
    o, lse,
    o_dot, lse_dot,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LOGITS_MOVE: tl.constexpr,
    VALUES_WAIT: tl.constexpr,
):  # fmt: skip
    block, head, batch, count, entries = lists.list_of_program(
        order, counts, entries, LISTS, LONGEST, BLOCKS, problem.H
    )
    first, info = tiles.place(block, head, batch, problem, BLOCK_Q)
    rows = first + tl.arange(0, BLOCK_Q)
    i = rows[:, None]
    first_key = tiles.interval_ends(first_keys, first, i, info, problem, 0)
    stop_key = tiles.interval_ends(stop_keys, first, i, info, problem, problem.K)
    block_range = tiles.full_keys(
        block, first, info, segment_ranges, first_key, stop_key, problem, BLOCKS, BLOCK_Q, BLOCK_K
    )
    segments = (q_segment_ids, kv_segment_ids)
    scale = logits.total_scale(softmax_scale, info, problem)
    q_tile = flash.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    q_dot_tile = flash.load_queries(q_dot, first, info, problem, problem.D, BLOCK_Q, True)
    lse_rows = flash.load_rows(lse, first, rows, info, problem, True, float("inf"))
    sinks_total, moved = logits.sinks_weights(sinks, sinks_dot, lse_rows[:, None], info, problem, problem.exact)
    sums, reference, unsettled = first_sums(lse_rows, sinks_total, moved), tl.zeros_like(moved), True
    acc = flash.zeros(BLOCK_Q, problem.V, problem)
    if count > 0:  # see tiles.py of flash_attention on loops
        coming = lists.entry(entries, 0, count)
        if VALUES_WAIT:
            waiting = values(v, v_dot, coming * BLOCK_K, first, info, problem, BLOCK_Q, BLOCK_K, CHECKED)
        for n in tl.range(0, count):
            start = coming * BLOCK_K
            coming = lists.entry(entries, n + 1, count)
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, first, info, problem, problem.D, BLOCK_Q, BLOCK_K, CHECKED)
            if VALUES_WAIT:
                v_tile, v_dot_tile = waiting
            else:
                v_tile, v_dot_tile = values(v, v_dot, start, first, info, problem, BLOCK_Q, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            bias_dot_tile = logits.biases(bias_dot, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            k_dot_tile = tiles.load_keys(k_dot, start, first, info, problem, problem.D, BLOCK_Q, BLOCK_K, CHECKED)
            product, s_dot = flash.over_features_and_tangent(q_tile, q_dot_tile, k_tile, k_dot_tile)
            weights = logits.weights_and_logit_tangents(
                product, s_dot, lse_rows[:, None], scale, scale_dot, bias_tile, bias_dot_tile, info, problem,
                LOGITS_MOVE,
            )  # fmt: skip
            p, s_dot = tiles.where_visible(
                weights, 0.0, mask_tile, start, block_range, i, j, segments, first_key, stop_key,
                info, problem, EDGES,
            )  # fmt: skip
            if LOGITS_MOVE and unsettled:
                sums, reference, unsettled = referred(sums, reference, p, s_dot, problem)
            s_dot -= reference[:, None]
            kept_p = p * logits.keep_factor(dropout, i, j, info, problem)
            acc, sums = summed(acc, sums, p, kept_p, s_dot, v_tile, v_dot_tile, problem, LOGITS_MOVE)
            if VALUES_WAIT:
                waiting = values(v, v_dot, coming * BLOCK_K, first, info, problem, BLOCK_Q, BLOCK_K, CHECKED)

    o_tile = flash.load_queries(o, first, info, problem, problem.V, BLOCK_Q, True)
    acc, moved = finished(acc, o_tile, sums, reference, sinks_total, problem)
    flash.store_rows(lse_dot, moved, rows, info, problem)
    flash.store_queries(o_dot, acc, first, info, problem, problem.V, BLOCK_Q)


@triton.jit
def values(v, v_dot, start, first, info, problem: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
           CHECKED: tl.constexpr):  # fmt: skip
    """A tile of v and one of v_dot, an empty tuple if that is absent."""
    tile = tiles.load_keys(v, start, first, info, problem, problem.V, BLOCK_Q, BLOCK_K, CHECKED)
    if v_dot is None:
        return tile, ()
    else:
        return tile, tiles.load_keys(v_dot, start, first, info, problem, problem.V, BLOCK_Q, BLOCK_K, CHECKED)
