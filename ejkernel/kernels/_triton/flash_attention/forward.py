"""The forward kernel: one pass over the keys with a running maximum and sum (arXiv 2307.08691).

Over the tiles of keys so far, row i has:  m = max_j s_j,  l = Σ_j exp(s_j − m),  acc = Σ_j exp(s_j − m)·v_j.
A new tile with maximum m' > m rescales l and acc by exp(m − m'). At the end o = acc / l and lse = m + log l.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import logits, masks, sequence_info, tiles
from .problem import keys_as_segments, problem_of, segment_ranges_of, zero_hidden_keys


def flash_attention(*operands, spec=FlashAttentionSpec(), config=KernelConfig()) -> Outputs:
    """o = softmax(scale·q·kᵀ + bias, masked)·v, and lse, the logsumexp of each row of logits."""
    given = Operands(*operands)
    operands = keys_as_segments(given)
    problem = problem_of(operands, spec)
    blocks = problem.blocks(config.block_q)
    (v,) = zero_hidden_keys(given, spec, given.v)
    o, lse = _launch.launch(
        forward_kernel,
        *operands._replace(v=v),
        segment_ranges_of(operands, config.block_q, config.block_k),
        out_type=(
            jax.ShapeDtypeStruct((problem.B, problem.S, problem.H, problem.V), operands.q.dtype),
            jax.ShapeDtypeStruct((problem.B, problem.H, problem.S), jnp.float32),
        ),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        EDGES=problem.edges(config.block_k),
        CHECKED=problem.checked(config.block_k, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
    )
    return Outputs(o, lse)


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    segment_ranges,
    o, lse,
    problem: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    block, first, info = sequence_info.queries_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_Q)
    block_range = sequence_info.keys_of_queries(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    segments = (q_segment_ids, kv_segment_ids)
    scale = logits.total_scale(softmax_scale, info, problem)
    m, l = logits.first_statistics(sinks, info, problem, BLOCK_Q)
    acc = tiles.zeros(BLOCK_Q, problem.V, problem)
    rows = first + tl.arange(0, BLOCK_Q)
    i = rows[:, None]
    q_tile = tiles.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    if block_range.begin < block_range.end:  # see tiles.py on loops
        for start in tl.range(block_range.begin, block_range.end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, info, problem, problem.D, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            product = tiles.over_features(q_tile, k_tile, None)
            s = logits.capped(product, scale, bias_tile, problem)
            v_tile = tiles.load_keys(v, start, info, problem, problem.V, BLOCK_K, CHECKED)
            (s,) = masks.where_visible(
                (s,), float("-inf"), mask_tile, start, block_range, i, j, segments, info, problem, EDGES
            )
            m_new = tl.maximum(m, tl.max(s, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen nothing yet
            rescale = logits.exponential(m - m_safe, 0.0, problem)
            p = logits.weights_of_maximum(s, m_safe, problem)
            l = l * rescale + tl.sum(p, 1)
            acc = tiles.scaled(acc, rescale[:, None])
            if dropout is not None:
                p = tl.where(logits.kept(dropout, i, j, info, problem), p, 0.0)
            acc = tiles.over_tokens(p, v_tile, acc)
            m = m_new

    if problem.N is not None:
        l = tl.where(info.sequence < problem.N, l, 0.0)
    empty = l == 0.0
    total = tl.where(empty, 1.0, l)
    tiles.store_rows(lse, tl.where(empty, float("-inf"), m * problem.unit + tl.log(total)), rows, info, problem)
    acc = tiles.scaled(acc, (problem.keep_scale / total)[:, None])
    tiles.store_queries(o, acc, first, info, problem, problem.V, BLOCK_Q)
