"""The tangent kernel: o_dot and lse_dot in one pass over the keys, with the logsumexp that the forward pass left.

With the weights p = exp(s − lse), p̃ what dropout leaves of them, and o = p̃·v,

    s_dot = (scale·(q_dot·kᵀ + q·k_dotᵀ) + scale_dot·q·kᵀ + bias_dot) ∘ (1 − (s/softcap)²)
    lse_dot = Σ_j p ∘ s_dot + Σ_n exp(sink_n − lse)·sink_dot_n
    o_dot = (p̃ ∘ s_dot)·v − lse_dot·o + p̃·v_dot

s_dot is taken relative to a number c of its row, its mean over the first keys, lest what should cancel leaves its
rounding, and that of o, where one key has all the weight:  o_dot = (p̃ ∘ (s_dot − c))·v − (lse_dot − c)·o + p̃·v_dot.

In float32 the weights are corrected for the rounding of lse (see rows.py): by their sum 1 + excess, known when the pass
ends, x / (1 + excess) being x − x·share with share = excess / (1 + excess). Sums carry what their rounding loses.

In 16 bits p̃ ∘ (s_dot − c) is rounded for its product with v, and o is taken off by the sum of what was rounded.
"""

import jax
import triton
import triton.language as tl

from ejkernel.kernels._segments import spans
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import logits, tiles
from .problem import keys_as_segments, problem_of, seen_lse
from .unseen import zero_unseen_keys


def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> Outputs:
    """The tangents of o and lse."""
    given, primals = primals, keys_as_segments(primals)
    problem = problem_of(primals, spec)
    blocks = problem.blocks(config.block_q)
    v, v_dot = zero_unseen_keys(given, problem, given.v, tangents.v)
    moving = (tangents.q, tangents.k, tangents.bias, tangents.softmax_scale)
    o_dot, lse_dot = _launch.launch(
        tangent_kernel,
        *primals._replace(v=v),
        spans(primals, config.block_q, config.block_k),
        *(tangents.q, tangents.k, v_dot, tangents.bias, tangents.sinks, tangents.softmax_scale),
        outputs.o,
        seen_lse(outputs.lse),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        grid=blocks * problem.H * problem.B,
        config=config,
        problem=problem,
        EDGES=problem.edges(config.block_k),
        CHECKED=problem.checked(config.block_k, over_keys=True),
        BLOCKS=blocks,
        BLOCK_Q=config.block_q,
        BLOCK_K=config.block_k,
        LOGITS_MOVE=any(x is not None for x in moving),
    )
    return Outputs(o_dot, lse_dot)


@triton.jit
def tangent_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    spans,
    q_dot, k_dot, v_dot, bias_dot, sinks_dot, scale_dot,
    o, lse,
    o_dot, lse_dot,
    problem: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, LOGITS_MOVE: tl.constexpr,
):  # fmt: skip
    block, first, frame = tiles.queries_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_Q)
    segments = (q_segment_ids, kv_segment_ids)
    _, _, _, _, q_len, _, _ = frame
    q = tiles.of_queries(q, frame, problem, problem.D)
    k = tiles.of_keys(k, frame, problem, problem.D)
    v = tiles.of_keys(v, frame, problem, problem.V)
    o = tiles.of_queries(o, frame, problem, problem.V)
    o_dot = tiles.of_queries(o_dot, frame, problem, problem.V)
    lse = tiles.of_rows(lse, frame, problem)
    lse_dot = tiles.of_rows(lse_dot, frame, problem)
    if k_dot is not None:
        k_dot = tiles.of_keys(k_dot, frame, problem, problem.D)
    if v_dot is not None:
        v_dot = tiles.of_keys(v_dot, frame, problem, problem.V)

    i = first + tl.arange(0, BLOCK_Q)[:, None]
    q_tile = tiles.load_tile(q, first, 0, q_len, problem.H, problem.D, BLOCK_Q, True)
    q_dot_tile = None
    if q_dot is not None:
        q_dot = tiles.of_queries(q_dot, frame, problem, problem.D)
        q_dot_tile = tiles.load_tile(q_dot, first, 0, q_len, problem.H, problem.D, BLOCK_Q, True)
    lse_rows = tiles.load_rows(lse, first, q_len, BLOCK_Q, True, float("inf"))
    scale = logits.total_scale(softmax_scale, frame, problem)
    begin, end, first_full, last_full, seen_begin, seen_end = tiles.keys_of_queries(
        block, first, frame, spans, problem, BLOCKS, BLOCK_Q, BLOCK_K
    )
    sinks_total, moved = logits.sinks_weights(sinks, sinks_dot, lse_rows, frame, problem)
    reference, rounded_moved = tl.zeros_like(moved), moved
    excess, excess_lost = logits.compensated(tl.full([BLOCK_Q], -1.0, tl.float32), 0.0, sinks_total)
    moved_lost = tl.zeros_like(moved)
    acc = tiles.zeros(BLOCK_Q, problem.V, problem)
    if begin < end:  # see tiles.py on loops
        for start in tl.range(begin, end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_tile(k, start, seen_begin, seen_end, problem.G, problem.D, BLOCK_K, CHECKED)
            v_tile = tiles.load_tile(v, start, seen_begin, seen_end, problem.G, problem.V, BLOCK_K, CHECKED)
            bias_tile, bias_dot_tile, mask_tile = None, None, None
            if bias is not None:
                bias_tile = logits.biases(bias, i, j, frame, problem)
            if bias_dot is not None:
                bias_dot_tile = logits.biases(bias_dot, i, j, frame, problem)
            if mask is not None:
                mask_tile = logits.unmasked(mask, i, j, frame, problem)
            k_dot_tile = None
            if k_dot is not None:
                k_dot_tile = tiles.load_tile(k_dot, start, seen_begin, seen_end, problem.G, problem.D, BLOCK_K, CHECKED)
            if v_dot is not None:
                v_dot_tile = tiles.load_tile(v_dot, start, seen_begin, seen_end, problem.G, problem.V, BLOCK_K, CHECKED)
            product, s_dot = tiles.over_features_and_tangent(q_tile, q_dot_tile, k_tile, k_dot_tile)
            s = logits.capped(product, scale, bias_tile, problem)
            if LOGITS_MOVE:
                s_dot = logits.logits_tangent(s_dot, s, product, scale, scale_dot, bias_dot_tile, frame, problem)
            p = logits.exponential(s, lse_rows[:, None], problem)
            if mask is not None:
                p, s_dot = tl.where(mask_tile, p, 0.0), tl.where(mask_tile, s_dot, 0.0)
            if EDGES and (start < first_full or start > last_full):
                ok = logits.visible(i, j, segments, frame, problem)
                p, s_dot = tl.where(ok, p, 0.0), tl.where(ok, s_dot, 0.0)
            if LOGITS_MOVE:
                if start == begin:
                    reference = tl.sum(p * s_dot, 1) * logits.correction_of(tl.sum(p, 1))
                s_dot -= reference[:, None]
            kept_p = p
            if dropout is not None:
                kept_p = p * tl.where(logits.kept(dropout, i, j, frame, problem), problem.keep_scale, 0.0)
            if problem.exact:
                excess, excess_lost = logits.compensated(excess, excess_lost, tl.sum(p, 1))
            if LOGITS_MOVE:
                if problem.exact:
                    moved, moved_lost = logits.compensated(moved, moved_lost, tl.sum(p * s_dot, 1))
                else:
                    moved += tl.sum(p * s_dot, 1)
                shares = (kept_p * s_dot).to(o.dtype.element_ty)
                if dropout is None:
                    rounded_moved += tl.sum(shares.to(tl.float32), 1)
                else:
                    off = (shares.to(tl.float32) - kept_p * s_dot) * (1 / problem.keep_scale)
                    rounded_moved += tl.sum(p * s_dot + off, 1)
                acc = tiles.over_tokens(shares, v_tile, acc)
            if v_dot is not None:
                acc = tiles.over_tokens(kept_p, v_dot_tile, acc)

    o_tile = tiles.load_tile(o, first, 0, q_len, problem.H, problem.V, BLOCK_Q, True)
    moved -= sinks_total * reference
    rounded_moved -= sinks_total * reference
    if problem.exact:
        share = excess / tl.where(excess == -1.0, 1.0, 1 + excess)
        moved_lost += moved * share
        rounded_moved = moved - moved_lost
        acc = tiles.scaled(acc, 1 - share[:, None])
    acc = tiles.less(acc, rounded_moved[:, None], o_tile)
    rows = first + tl.arange(0, BLOCK_Q)
    tl.store(lse_dot + rows, reference + moved - moved_lost, mask=rows < q_len)
    tiles.store_tile(o_dot, acc, first, q_len, problem.H, problem.V, BLOCK_Q)
