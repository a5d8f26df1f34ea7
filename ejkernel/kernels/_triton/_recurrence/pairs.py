"""The intra-chunk weights S_ij = Σ_d q_id k_jd exp(G_id − G_jd) for the pairs of rows j ≤ i of a chunk."""

import triton
import triton.language as tl

from . import tiles

# exp(G_i − G_j) is factored into exp(G_i − m)·exp(m − G_j) only if no exponent exceeds this: then q and k up to 1e8
# times their factors stay within the range of float32 and bfloat16.
LARGEST_EXPONENT = tl.constexpr(65.0)
LARGEST_EXACT_EXPONENT = tl.constexpr(10.0)  # the error of exp(x) is that of x, and so grows with x


@triton.jit
def pair_decays(gate, G, p: tl.constexpr):
    """exp(G_i − G_j) where j ≤ i, else 0, for decays of heads; 1 and 0 if heads do not decay."""
    if p.by_head:
        return tl.where(tiles.causal_mask(p), tl.exp(pair_sums(gate, G, p)), 0.0)
    else:
        return tl.where(tiles.causal_mask(p), 1.0, 0.0)


@triton.jit
def pair_sums(gate, G, p: tl.constexpr):
    """G_i − G_j where j ≤ i, else 0."""
    if p.exact:
        rows = tl.arange(0, p.C)
        return tl.cumsum(tl.where(rows[:, None] > rows[None, :], gate[:, None], 0.0), 0)
    else:
        return tl.where(tiles.causal_mask(p), G[:, None] - G[None, :], 0.0)


@triton.jit
def middle(T):
    """m, the reference of a chunk's factored decays: |G − m| is at most half of the log decay of the chunk."""
    return 0.5 * T


@triton.jit
def can_factor(G, m, p: tl.constexpr):
    """Whether exp(G_i − G_j) can be factored into exp(G_i − m)·exp(m − G_j): no exponent is too large."""
    return tl.max(tl.max(tl.abs(G - m[None, :]), 1), 0) < (LARGEST_EXACT_EXPONENT if p.exact else LARGEST_EXPONENT)


@triton.jit
def pair_weights(q, k, gate, G, T, p: tl.constexpr):
    """S_ij = Σ_d q_id k_jd exp(G_id − G_jd) where j ≤ i, else 0; float32."""
    return decayed_pairs(pair_products(q, k, gate, G, T, p), gate, G, p)


@triton.jit
def decayed_pairs(products, gate, G, p: tl.constexpr):
    """S, from the sum of `pair_products` over all features."""
    return tl.where(tiles.causal_mask(p), products, 0.0) if p.by_feature else products * pair_decays(gate, G, p)


@triton.jit
def pair_products(q, k, gate, G, T, p: tl.constexpr):
    """Σ_d q_id k_jd over a block of features, times exp(G_id − G_jd) if features decay; float32.

    With decays it is the matrix product of q exp(G − m) and k exp(m − G) if the exponents allow it, and otherwise
    computed row by row.
    """
    if p.by_feature:
        m = middle(T)
        if can_factor(G, m, p):
            scaled_q = (q.to(tl.float32) * tl.exp(G - m[None, :])).to(p.dtype)
            scaled_k = (k.to(tl.float32) * tl.exp(m[None, :] - G)).to(p.dtype)
            S = tiles.product(scaled_q, tl.trans(scaled_k), p)
        else:
            S = weights_by_row(q, k, gate, G, p)
        return S
    else:
        return tiles.product(q, tl.trans(k), p)


@triton.jit
def weights_by_row(q, k, gate, G, p: tl.constexpr):
    rows, wide_q, wide_k = tl.arange(0, p.C), q.to(tl.float32), k.to(tl.float32)
    S = tl.full([p.C, p.C], 0.0, tl.float32)
    for j in range(p.C):
        row_k, decay = row_and_decays(j, wide_k, gate, G, p)
        S += tl.where(rows[None, :] == j, tl.sum(wide_q * row_k[None, :] * decay, 1)[:, None], 0.0)
    return S


@triton.jit
def row_and_decays(j, k, gate, G, p: tl.constexpr):
    """k_j [D], and exp(G_i − G_j) [C, D] for the rows i ≥ j, else 0."""
    rows = tl.arange(0, p.C)
    if p.exact:
        between = tl.cumsum(tl.where((rows > j)[:, None], gate, 0.0), 0)
    else:
        between = G - tl.sum(tl.where((rows == j)[:, None], G, 0.0), 0)[None, :]
    return tl.sum(tl.where((rows == j)[:, None], k, 0.0), 0), tl.where((rows >= j)[:, None], tl.exp(between), 0.0)
