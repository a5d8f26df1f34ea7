"""The intra-chunk gradients of q, k and decays, from the pairs of rows j ≤ i of a chunk (see pairs.py)."""

import triton
import triton.language as tl

from . import pairs, tiles


@triton.jit
def gate_gradients(dg_intra, dq_inter, dk_inter, state_term, factored, p: tl.constexpr):
    """The gradients of decays, from the part of pairs (see `pair_gradients`) and the terms of the inter-chunk sums."""
    if factored:
        dq_inter += dg_intra
        before = dk_inter - dq_inter
        found = tl.sum(dq_inter, 0) + (tl.cumsum(before, 0) - before) + state_term
    else:
        rows = tl.arange(0, p.C)
        dk_inter = tiles.sum_where(rows[:, None] > rows[None, :], dk_inter, p)
        found = dg_intra + tl.cumsum(dq_inter, 0, reverse=True) + dk_inter + state_term
    return found


@triton.jit
def pair_gradients(q, k, W, gate, G, T, dq, dk, factored, p: tl.constexpr):
    """dq and dk, as inter-chunk plus intra-chunk part, and the contribution of pairs j < i to dg.

    At row t the latter is Σ_{j<t≤i} W_ij E_ij q_i ∘ k_j; for decays of heads it has a column per j, yet to be summed.
    If the decays can be factored, it is q_i ∘ dq_i − k_i ∘ dk_i at row i instead, whose sum over i ≥ t is the same.
    """
    rows = tl.arange(0, p.C)
    before = rows[:, None] > rows[None, :]
    if p.by_feature:
        wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
        of_itself = tl.sum(tl.where(rows[:, None] == rows[None, :], W, 0.0), 1)[:, None]
        dq += of_itself * wide_k
        dk += of_itself * wide_q
        W = tl.where(before, W, 0.0)
        if factored:
            m = pairs.middle(T)[None, :]
            W_tile, to_q, to_k = W.to(p.dtype), tl.exp(G - m), tl.exp(m - G)
            scaled_q, scaled_k = (wide_q * to_q).to(p.dtype), (wide_k * to_k).to(p.dtype)
            part_q, part_k = tiles.product(W_tile, scaled_k, p), tiles.product(tl.trans(W_tile), scaled_q, p)
            dg_intra = scaled_q.to(tl.float32) * part_q - scaled_k.to(tl.float32) * part_k
            dq += part_q * to_q
            dk += part_k * to_k
        else:
            part_q, part_k, dg_intra = gradients_by_row(wide_q, wide_k, W, gate, G, p)
            dq += part_q
            dk += part_k
    else:
        W_tile = (W * pairs.pair_decays(gate, G, p)).to(p.dtype)
        dq = tl.dot(W_tile, k, dq, input_precision=p.precision)
        dk = tl.dot(tl.trans(W_tile), q, dk, input_precision=p.precision)
        dg_intra = tl.where(before, W * pairs.pair_weights(q, k, gate, G, T, p), 0.0)
        dg_intra = tl.where(before, tl.cumsum(dg_intra, 0, reverse=True), 0.0)
    return dq, dk, dg_intra


@triton.jit
def gradients_by_row(q, k, W, gate, G, p: tl.constexpr):
    rows = tl.arange(0, p.C)
    dq, dk, dg_intra = tl.zeros_like(q), tl.zeros_like(q), tl.zeros_like(q)
    for j in range(p.C):
        row_k, decay = pairs.row_and_decays(j, k, gate, G, p)
        W_j = tl.sum(tl.where(rows[None, :] == j, W, 0.0), 1)[:, None] * decay
        pair_j = W_j * row_k[None, :]
        dq += pair_j
        dk += tl.where((rows == j)[:, None], tl.sum(W_j * q, 0)[None, :], 0.0)
        dg_intra += tl.where((rows > j)[:, None], tl.cumsum(pair_j * q, 0, reverse=True), 0.0)
    return dq, dk, dg_intra
