"""The forward kernel: the running maximum and sum of flash_attention, over the tiles of a list.

Over the tiles of keys so far, row i has:  m = max_j s_j,  l = Σ_j exp(s_j − m),  acc = Σ_j exp(s_j − m)·v_j.
A new tile with maximum m' > m rescales l and acc by exp(m − m'). At the end o = acc / l and lse = m + log l.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton.flash_attention import logits, masks
from ejkernel.kernels._triton.flash_attention import tiles as flash
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig

from . import lists, tiles
from .call import call_of
from .fully_masked import zero_hidden_keys


def blocksparse_attention(*operands, spec=BlocksparseAttentionSpec(), config=KernelConfig()) -> Outputs:
    """o = softmax(scale·q·kᵀ + bias, masked)·v over kept blocks, and lse, the logsumexp of each row of logits."""
    call = call_of(Operands(*operands), spec)
    problem, tile = call.problem, call.tile(config.block_q, config.block_k)
    blocks, of_keys = math.ceil(problem.S / tile[0]), call.lists_of_keys(tile)
    (v,) = zero_hidden_keys(call, call.operands.v)
    o, lse = _launch.launch(
        forward_kernel,
        *call.with_arrays(v=v).arrays,
        call.segment_ranges(tile),
        *call.intervals,
        *of_keys,
        out_type=(
            jax.ShapeDtypeStruct((problem.B, problem.S, problem.H, problem.V), v.dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32),
        ),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        **of_keys.constants,
        EDGES=call.is_edged or problem.K % tile[1] != 0,
        CHECKED=call.checked(tile, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=tile[0],
        BLOCK_K=tile[1],
    )
    return Outputs(o, lse)


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout,
    segment_ranges, first_keys, stop_keys, order, counts, entries,
    o, lse,
    problem: tl.constexpr, LISTS: tl.constexpr, LONGEST: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
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
    m, l = logits.first_statistics(sinks, info, problem, BLOCK_Q)
    acc = flash.zeros(BLOCK_Q, problem.V, problem)
    q_tile = flash.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    if count > 0:  # see tiles.py of flash_attention on loops
        coming = lists.entry(entries, 0, count)
        for n in tl.range(0, count):
            start = coming * BLOCK_K
            coming = lists.entry(entries, n + 1, count)
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, first, info, problem, problem.D, BLOCK_Q, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            product = flash.over_features(q_tile, k_tile, None)
            s = logits.capped(product, scale, bias_tile, problem)
            v_tile = tiles.load_keys(v, start, first, info, problem, problem.V, BLOCK_Q, BLOCK_K, CHECKED)
            (s,) = tiles.where_visible(
                (s,), float("-inf"), mask_tile, start, block_range, i, j, segments, first_key, stop_key,
                info, problem, EDGES,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows without a visible key so far
            rescale = logits.exponential(m - m_safe, 0.0, problem)
            p = logits.weights_of_maximum(s, m_safe, problem)
            l = l * rescale + tl.sum(p, 1)
            acc = flash.scaled(acc, rescale[:, None])
            if dropout is not None:
                p = tl.where(logits.kept(dropout, i, j, info, problem), p, 0.0)
            acc = flash.over_tokens(p, v_tile, acc)
            m = m_new

    if first_keys is not None:  # tokens outside of all sequences have lse −∞, whatever the sinks
        l = tl.where(tiles.interval_ends(first_keys, first, rows, info, problem, 0) < 0, 0.0, l)
    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    flash.store_rows(lse, tl.where(empty, float("-inf"), m * problem.unit + tl.log(total)), rows, info, problem)
    acc = flash.scaled(acc, (problem.keep_scale / total)[:, None])
    flash.store_queries(o, acc, first, info, problem, problem.V, BLOCK_Q)
