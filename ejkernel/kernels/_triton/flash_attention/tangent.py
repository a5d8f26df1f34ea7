"""The tangent kernel: o_dot and lse_dot in one pass over the keys, from lse of the forward.

With the weights p = exp(s − lse), p̃ the weights after dropout, and o = p̃·v,

    s_dot = (scale·(q_dot·kᵀ + q·k_dotᵀ) + scale_dot·q·kᵀ + bias_dot) ∘ (1 − (s/softcap)²)
    lse_dot = Σ_j p ∘ s_dot + Σ_n exp(sink_n − lse)·sink_dot_n
    o_dot = (p̃ ∘ s_dot)·v − lse_dot·o + p̃·v_dot

If one key has all the weight, the first two terms cancel, which would leave their rounding errors and that of o. So
s_dot is taken relative to a number c for each row, its mean over the first keys that have weight:

    o_dot = (p̃ ∘ (s_dot − c))·v − (lse_dot − c)·o + p̃·v_dot

In float32 the weights are corrected for the rounding of lse (see rows.py). Their sum 1 + excess is known only at the
end, where x / (1 + excess) is computed as x − x·share with share = excess / (1 + excess). Sums are compensated (Kahan).

In 16 bits p̃ ∘ (s_dot − c) is rounded for its product with v; the factor of o is then the sum of the rounded values.

The weights of a split of the keys do not sum to 1: they are not corrected, and c is 0.
"""

from typing import NamedTuple

import jax
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from . import logits, masks, sequence_info, tiles
from .configs import values_wait
from .problem import keys_as_segments, problem_of, seen_lse, segment_ranges_of, zero_hidden_keys


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
    v, v_dot = zero_hidden_keys(given, spec, given.v, tangents.v)
    moving = (tangents.q, tangents.k, tangents.bias, tangents.softmax_scale)
    o_dot, lse_dot = _launch.launch(
        tangent_kernel,
        *primals._replace(v=v),
        segment_ranges_of(primals, config.block_q, config.block_k),
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
        VALUES_WAIT=values_wait(primals, config.block_q, config.block_k, config.num_warps, config.num_stages),
    )
    return Outputs(o_dot, lse_dot)


@triton.jit
def tangent_kernel(
    q, k, v, bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, cu_q, cu_k, dropout,
    segment_ranges,
    q_dot, k_dot, v_dot, bias_dot, sinks_dot, scale_dot,
    o, lse,
    o_dot, lse_dot,
    problem: tl.constexpr, EDGES: tl.constexpr, CHECKED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, LOGITS_MOVE: tl.constexpr, VALUES_WAIT: tl.constexpr,
):  # fmt: skip
    block, first, info = sequence_info.queries_of_program(cu_q, cu_k, problem, BLOCKS, BLOCK_Q)
    block_range = sequence_info.keys_of_queries(block, first, info, segment_ranges, problem, BLOCKS, BLOCK_Q, BLOCK_K)
    scale = logits.total_scale(softmax_scale, info, problem)
    rows = first + tl.arange(0, BLOCK_Q)
    i = rows[:, None]
    q_tile = tiles.load_queries(q, first, info, problem, problem.D, BLOCK_Q, True)
    q_dot_tile = tiles.load_queries(q_dot, first, info, problem, problem.D, BLOCK_Q, True)
    lse_rows = tiles.load_rows(lse, first, rows, info, problem, True, float("inf"))
    sinks_total, moved = logits.sinks_weights(sinks, sinks_dot, lse_rows[:, None], info, problem, problem.corrected)
    sums, reference, unsettled = first_sums(lse_rows, sinks_total, moved), tl.zeros_like(moved), True
    acc = tiles.zeros(BLOCK_Q, problem.V, problem)
    if block_range.begin < block_range.end:  # see tiles.py on loops
        if VALUES_WAIT:
            coming = values(v, v_dot, block_range.begin, info, problem, BLOCK_K, CHECKED)
        for start in tl.range(block_range.begin, block_range.end, BLOCK_K):
            j = start + tl.arange(0, BLOCK_K)[None, :]
            k_tile = tiles.load_keys(k, start, info, problem, problem.D, BLOCK_K, CHECKED)
            if VALUES_WAIT:
                v_tile, v_dot_tile = coming
            else:
                v_tile, v_dot_tile = values(v, v_dot, start, info, problem, BLOCK_K, CHECKED)
            bias_tile = logits.biases(bias, i, j, info, problem)
            bias_dot_tile = logits.biases(bias_dot, i, j, info, problem)
            mask_tile = masks.unmasked(mask, i, j, info, problem)
            k_dot_tile = tiles.load_keys(k_dot, start, info, problem, problem.D, BLOCK_K, CHECKED)
            product, s_dot = tiles.over_features_and_tangent(q_tile, q_dot_tile, k_tile, k_dot_tile)
            weights = logits.weights_and_logit_tangents(
                product, s_dot, lse_rows[:, None], scale, scale_dot, bias_tile, bias_dot_tile, info, problem,
                LOGITS_MOVE,
            )  # fmt: skip
            p, s_dot = masks.where_visible(
                weights, 0.0, mask_tile, start, block_range, i, j, (q_segment_ids, kv_segment_ids), info, problem, EDGES
            )
            if LOGITS_MOVE and not problem.split and unsettled:
                sums, reference, unsettled = referred(sums, reference, p, s_dot, problem)
            s_dot -= reference[:, None]
            kept_p = p * logits.keep_factor(dropout, i, j, info, problem)
            acc, sums = summed(acc, sums, p, kept_p, s_dot, v_tile, v_dot_tile, problem, LOGITS_MOVE)
            if VALUES_WAIT:  # tokens past the end are not read
                coming = values(v, v_dot, start + BLOCK_K, info, problem, BLOCK_K, True)

    o_tile = tiles.load_queries(o, first, info, problem, problem.V, BLOCK_Q, True)
    acc, moved = finished(acc, o_tile, sums, reference, sinks_total, problem)
    tiles.store_rows(lse_dot, moved, rows, info, problem)
    tiles.store_queries(o_dot, acc, first, info, problem, problem.V, BLOCK_Q)


@triton.jit
def values(v, v_dot, start, info, problem: tl.constexpr, BLOCK_K: tl.constexpr, CHECKED: tl.constexpr):
    """A tile of v and one of v_dot, an empty tuple if that is absent."""
    tile = tiles.load_keys(v, start, info, problem, problem.V, BLOCK_K, CHECKED)
    if v_dot is None:
        return tile, ()
    else:
        return tile, tiles.load_keys(v_dot, start, info, problem, problem.V, BLOCK_K, CHECKED)


class Sums(NamedTuple):
    """The running sums of each row.

    excess, excess_lost: Σ p − 1, and its rounding error.
    moved, moved_lost: Σ p ∘ (s_dot − c), and its rounding error.
    rounded: that sum over the values rounded for their product with v.
    weight: Σ p as long as c may still change.
    """

    excess: tl.tensor
    excess_lost: tl.tensor
    moved: tl.tensor
    moved_lost: tl.tensor
    rounded: tl.tensor
    weight: tl.tensor


@triton.jit
def first_sums(lse, sinks_total, sinks_moved):
    """The initial sums of rows, over the sinks alone; a fully masked row counts as one whose c is settled."""
    zero = tl.zeros_like(sinks_moved)
    excess, excess_lost = logits.compensated(zero - 1.0, zero, sinks_total)
    return Sums(excess, excess_lost, sinks_moved, zero, sinks_moved, tl.where(lse == float("inf"), 1.0, 0.0))


@triton.jit
def referred(sums, reference, p, s_dot, problem: tl.constexpr):
    """The sums relative to a possibly new c of each row, c, and whether it may still change in any row.

    A row takes the mean of s_dot over a tile as its c if all earlier weights are negligible beside those of this tile.
    Of the sums with the former c, only that for lse_dot is exact enough to need the change.
    """
    excess, excess_lost, moved, moved_lost, rounded, weight = sums
    least: tl.constexpr = 2.0**-32 if problem.exact else 2.0**-16
    here = tl.sum(p, 1)
    mean = tl.sum(p * s_dot, 1) * logits.correction_of(here)
    mean = tl.where(weight < least * here, mean, reference)
    moved += weight * (reference - mean)
    weight += here
    return Sums(excess, excess_lost, moved, moved_lost, rounded, weight), mean, tl.min(weight) < least


@triton.jit
def summed(acc, sums, p, kept_p, s_dot, v, v_dot, problem: tl.constexpr, LOGITS_MOVE: tl.constexpr):
    """The accumulator (p̃ ∘ (s_dot − c))·v + p̃·v_dot and the sums, after adding the terms of a tile."""
    excess, excess_lost, moved, moved_lost, rounded, weight = sums
    if problem.exact:
        excess, excess_lost = logits.compensated(excess, excess_lost, tl.sum(p, 1))
        if LOGITS_MOVE:
            moved, moved_lost = logits.compensated(moved, moved_lost, tl.sum(p * s_dot, 1))
    elif LOGITS_MOVE:
        moved += tl.sum(p * s_dot, 1)
    shares = (kept_p * s_dot).to(v[0].dtype)
    if LOGITS_MOVE and not problem.exact:
        if problem.dropout_rate == 0.0:
            rounded += tl.sum(shares.to(tl.float32), 1)
        else:
            off = (shares.to(tl.float32) - kept_p * s_dot) * (1 / problem.keep_scale)
            rounded += tl.sum(p * s_dot + off, 1)
    if LOGITS_MOVE:
        acc = tiles.over_tokens(shares, v, acc)
    if len(v_dot) > 0:
        acc = tiles.over_tokens(kept_p, v_dot, acc)
    return acc, Sums(excess, excess_lost, moved, moved_lost, rounded, weight)


@triton.jit
def finished(acc, o, sums, reference, sinks_total, problem: tl.constexpr):
    """o_dot and lse_dot from the sums of the pass; c is subtracted from the tangents of sinks here."""
    moved, lost = sums.moved - sinks_total * reference, sums.moved_lost
    rounded = sums.rounded - sinks_total * reference
    if problem.corrected:
        share = sums.excess / tl.where(sums.excess == -1.0, 1.0, 1 + sums.excess)
        lost += moved * share
        acc = tiles.scaled(acc, 1 - share[:, None])
    if problem.exact:
        rounded = moved - lost
    return tiles.less(acc, rounded[:, None], o), reference + moved - lost
