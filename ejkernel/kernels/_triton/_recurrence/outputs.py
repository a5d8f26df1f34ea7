"""The outputs of a chunk, or the gradients of its values, from sums over the features of its queries and keys.

o_i = scale (exp(G_i) q_iᵀ h + Σ_j S_ij v_j),    dv_j = Σ_i scale S_ij do_i + exp(T − G_j) dh'ᵀ k_j
"""

import triton
import triton.language as tl

from . import pairs, tiles
from .problem import Problem
from .splits import PROGRAMS


def columns_of_program(p: Problem, block: int) -> int:
    """The features of values that a program computes, if these do not decay: a block, or all of them.

    All of them where the features of keys decay, as the weights of pairs are the greater part of the work then, at two
    exponentials for each feature. Chunks and heads alone have to be enough programs.
    """
    whole = p.by_feature and p.B * p.chunks * p.H >= PROGRAMS
    return max(p.V, block) if whole else block


@triton.jit
def over_features(
    q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, column,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The sums over features of `pair_products` and of the inter-chunk part; and gate and G.

    The inter-chunk part is the product with the state, or, if BACKWARD, with its cotangent. If features decay, gate and
    G are those of the first block of features.
    """
    products, inter_chunk = tl.full([p.C, p.C], 0.0, tl.float32), tl.full([p.C, COLUMNS], 0.0, tl.float32)
    gate, G, _, _ = tiles.gates(g, gk, g_gamma, batch, at, left, head, 0, ROWS, p)
    row_blocks: tl.constexpr = p.D_PAD // ROWS
    if p.exact or row_blocks > (1 if p.by_feature else 2):  # unrolled, the blocks would not fit into registers
        for row in tl.range(0, p.D, ROWS):
            products, inter_chunk = add_block(
                products, inter_chunk, q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, row,
                column, p, ROWS, COLUMNS, BACKWARD,
            )  # fmt: skip
    else:
        for row in tl.static_range(0, row_blocks * ROWS, ROWS):
            products, inter_chunk = add_block(
                products, inter_chunk, q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, row,
                column, p, ROWS, COLUMNS, BACKWARD,
            )  # fmt: skip
    return products, inter_chunk, gate, G


@triton.jit
def pairs_over_features(q, k, g, gk, g_gamma, batch, at, left, head, p: tl.constexpr, ROWS: tl.constexpr):
    """The sum over features of `pair_products`."""
    products = tl.full([p.C, p.C], 0.0, tl.float32)
    for row in tl.range(0, p.D, ROWS):
        q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p).to(p.dtype)
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p).to(p.dtype)
        gate, G, _, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
        products = add_pairs(products, q_tile, k_tile, gate, G, T, p)
    return products


@triton.jit
def add_pairs(products, q, k, gate, G, T, p: tl.constexpr):
    """products + `pair_products` of a block of features."""
    if p.exact:  # subtraction, as the compiler would accumulate an addition into one long sum
        return products - pairs.pair_products(-q, k, gate, G, T, p)
    else:
        return products + pairs.pair_products(q, k, gate, G, T, p)


@triton.jit
def inter_chunk_over_features(
    q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, column,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The sum over features of the inter-chunk part for a block of columns."""
    inter_chunk = tl.full([p.C, COLUMNS], 0.0, tl.float32)
    for row in tl.range(0, p.D, ROWS):
        _, G, U, _ = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
        state = tiles.load_state(states, of_chunk, row, ROWS, column, COLUMNS, p)
        if BACKWARD:
            k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p).to(p.dtype)
            inter_chunk += from_state_cotangent(k_tile, state, U, p)
        else:
            q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p).to(p.dtype)
            inter_chunk += from_state(q_tile, state, G, p)
    return inter_chunk


@triton.jit
def add_block(
    products, inter_chunk, q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, row, column,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The sums of `over_features`, with the terms of one block of features added."""
    q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p).to(p.dtype)
    k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p).to(p.dtype)
    gate, G, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
    products = add_pairs(products, q_tile, k_tile, gate, G, T, p)
    state = tiles.load_state(states, of_chunk, row, ROWS, column, COLUMNS, p)
    if BACKWARD:
        inter_chunk += from_state_cotangent(k_tile, state, U, p)
    else:
        inter_chunk += from_state(q_tile, state, G, p)
    return products, inter_chunk


@triton.jit
def from_state(q, state, G, p: tl.constexpr):
    """The inter-chunk part exp(G_i) scale q_iᵀ h over a block of features; without exp(G_i) for decays of heads."""
    if p.by_feature:
        return tiles.product((tiles.times(q, G, p) * p.scale).to(p.dtype), state, p)
    else:
        return tiles.product(q, state, p) * p.scale


@triton.jit
def from_state_cotangent(k, dstate, U, p: tl.constexpr):
    """The inter-chunk part exp(T − G_j) dh'ᵀ k_j of dv over a block of features."""
    if p.by_feature:
        return tiles.product(tiles.times(k, U, p).to(p.dtype), dstate, p)
    else:
        return tiles.times(tiles.product(k, dstate, p), U, p)


@triton.jit
def chunk_outputs(products, inter_chunk, v, gate, G, gv, dt, skip, batch, at, left, head, column, p: tl.constexpr):
    """o_i from the sums over all features of `pair_products` and `from_state`."""
    p_v: tl.constexpr = p.of_values
    weights = pairs.decayed_pairs(products, gate, G, p) * p.scale
    if dt is not None:
        weights *= tl.trans(tiles.load_row_factors(dt, batch, at, left, head, p))
    inter_chunk = inter_chunk if p.by_feature else tiles.times(inter_chunk, G, p)
    gates_v = None
    if gv is not None:
        gates_v = tiles.gates(None, gv, None, batch, at, left, head, column, v.shape[1], p_v)
        inter_chunk = tiles.times(inter_chunk, gates_v[1], p_v)
    if skip is not None:
        inter_chunk += tl.load(skip + batch * p.H + head).to(tl.float32) * v.to(tl.float32)
    return add_values(inter_chunk, weights, v, gates_v, p)


@triton.jit
def add_values(total, weights, v, gates_v, p: tl.constexpr):
    """total + Σ_j S_ij v_j; with gates of values, total + Σ_j S_ij exp(G_i − G_j) v_j."""
    p_v: tl.constexpr = p.of_values
    if gates_v is None:
        return tiles.add_product(total, weights, v, p, p.weight_parts)
    else:
        return total + decaying(weights, v, gates_v[0], gates_v[1], gates_v[3], p_v)


@triton.jit
def decaying(weights, v, gate, G, T, p: tl.constexpr):
    """Σ_j S_ij exp(G_i − G_j) v_j, with decays of the features of values."""
    m = pairs.middle(T)
    if pairs.can_factor(G, m, p):
        scaled_v = tiles.times(v, m[None, :] - G, p)
        o = tiles.times(tiles.product(weights, scaled_v, p), G - m[None, :], p)
    else:
        rows, o = tl.arange(0, p.C), tl.full(v.shape, 0.0, tl.float32)
        for j in range(p.C):
            row_v, decay = pairs.row_and_decays(j, v, gate, G, p)
            o += tl.sum(tl.where(rows[None, :] == j, weights, 0.0), 1)[:, None] * decay * row_v[None, :]
    return o
