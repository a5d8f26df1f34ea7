"""The tangent: chunk states and their tangents forwards in time, then the tangents of all chunks in parallel.

With h the initial state of a chunk, ẋ the tangent of x, E_ij = exp(G_i − G_j) and S_ij = q_iᵀ E_ij k_j for j ≤ i
(decays may differ between features):

    ȯ_i = scale (exp(G_i) ((q̇_i + Ġ_i q_i)ᵀ h + q_iᵀ ḣ) + Σ_j (Ṡ_ij v_j + S_ij v̇_j))
    Ṡ_ij = (q̇_i + Ġ_i q_i)ᵀ E_ij k_j + q_iᵀ E_ij (k̇_j − Ġ_j k_j)
    ḣ' = exp(T) (ḣ + Ṫ h) + Σ_j exp(T − G_j) (k̇_j v_jᵀ + k_j v̇_jᵀ + (Ṫ − Ġ_j) k_j v_jᵀ)

If the features of values decay, all sums have their exponentials, too, v̇_j is replaced by v̇_j − Ġ_j v_j, and ȯ_i has
the further term Ġ_i o_i, with G of values.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import outputs, pairs, tiles
from .problem import gamma_of_batch, places_of, problem_of, zero_elsewhere
from .states import WARPS

MOST_UNSPLIT_FEATURES, ROWS = {tl.bfloat16: 128, tl.float32: 32}, {tl.bfloat16: 64, tl.float32: 32}
"""By the dtype of products, the most features of keys that a program takes at once, and the size of a block of more."""


def recurrence_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: RecurrenceSpec, config: RecurrenceConfig
) -> Outputs:
    """The tangents of o and the final state; a tangent of None is zero."""
    x, dot = (gamma_of_batch(operands, primals.q.shape[0]) for operands in (primals, tangents))
    p = problem_of(x, spec, config.chunk_size)
    if x.gv is not None and not p.exact:
        # For products that follow one another in one basic block, Triton gives all warps the same tiles. With decays of
        # features of keys, even zero ones, the first product is within a branch, which is ten times faster.
        p = replace(p, by_head=False, by_feature=True)
    places = places_of(x, p)
    rows, columns, block = min(config.block_k, p.D_PAD), min(config.block_k, p.V_PAD), min(config.block_v, p.V_PAD)
    kept = jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.D, p.V), jnp.bfloat16 if p.dtype == tl.bfloat16 else jnp.float32)
    states, states_dot, final_dot = _launch.launch(
        states_kernel,
        *(*x[1:8], *dot[1:8]),
        *places[:3],
        out_type=(kept, kept, jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.D, p.V), jnp.float32)),
        grid=p.B * p.sequences * p.H * triton.cdiv(p.D, rows) * triton.cdiv(p.V, columns),
        config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=WARPS, num_stages=1),
        p=p,
        ROWS=rows,
        COLUMNS=columns,
    )
    o_dot = _launch.launch(
        outputs_kernel,
        *(*x[:7], *dot[:7]),
        *(states, states_dot, *places[:4]),
        out_type=jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), x.v.dtype),
        grid=p.B * p.chunks * p.H * triton.cdiv(p.V, block),
        config=config,
        p=p,
        BLOCK=block,
        ROWS=p.D_PAD if MOST_UNSPLIT_FEATURES[p.dtype] >= p.D_PAD else ROWS[p.dtype],
    )
    return Outputs(zero_elsewhere(o_dot, places), final_dot)


@triton.jit
def states_kernel(
    k, v, g, gk, gv, g_gamma, start, k_dot, v_dot, g_dot, gk_dot, gv_dot, g_gamma_dot, start_dot, first, length, chunk,
    states, states_dot, end_dot,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    row_blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    p_v: tl.constexpr = p.of_values
    gates_vary: tl.constexpr = g_dot is not None or gk_dot is not None or g_gamma_dot is not None
    pid = tl.program_id(0)
    column, row = pid % blocks * COLUMNS, pid // blocks % row_blocks * ROWS
    pid = pid // (blocks * row_blocks)
    head, n, batch = pid % p.H, pid // p.H % p.sequences, pid // (p.H * p.sequences)
    token, tokens, first_chunk = tiles.sequence_at(batch, n, first, length, chunk, p)
    number = (batch * p.sequences + n) * p.H + head
    state = tiles.first_state(start, number, row, ROWS, column, COLUMNS, p)
    dot = tiles.first_state(start_dot, number, row, ROWS, column, COLUMNS, p)
    for c in tl.range(0, (tokens + p.C - 1) // p.C):
        at, left = token + p.step * (c * p.C), tokens - c * p.C
        of_chunk = (batch * p.chunks + first_chunk + c) * p.H + head
        kept, inside = tiles.state_pointers(states, of_chunk, row, ROWS, column, COLUMNS, p)
        tl.store(kept, state.to(states.dtype.element_ty), mask=inside)
        kept, inside = tiles.state_pointers(states_dot, of_chunk, row, ROWS, column, COLUMNS, p)
        tl.store(kept, dot.to(states.dtype.element_ty), mask=inside)
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p)
        v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, COLUMNS, p)
        _, _, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
        if gates_vary:
            _, _, U_dot, T_dot = tiles.gates(g_dot, gk_dot, g_gamma_dot, batch, at, left, head, row, ROWS, p, True)
            dot += state * (T_dot[:, None] if p.by_feature else T_dot)
        if gv_dot is not None:
            _, _, U_v_dot, T_v_dot = tiles.gates(None, gv_dot, None, batch, at, left, head, column, COLUMNS, p_v, True)
            dot += state * T_v_dot[None, :]
        dot = tiles.decayed(dot, T, p)
        if gv is not None:
            _, _, U_v, T_v = tiles.gates(None, gv, None, batch, at, left, head, column, COLUMNS, p_v)
            dot, state = dot * tl.exp(T_v)[None, :], state * tl.exp(T_v)[None, :]
            v_tile = tiles.times(v_tile, U_v, p_v)
        # The tangent of the decay is added to k_dot or to v_dot, to that which may be rounded in parts in the product.
        if k_dot is not None or (gates_vary and p.by_feature):
            k_change = load_change(k_dot, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, tl.float32, p)
            if gates_vary and p.by_feature:
                k_change += U_dot * k_tile.to(tl.float32)
            dot = tiles.add_tokens(dot, k_change, v_tile, U, 1.0, p, True)
        if v_dot is not None or gv_dot is not None or (gates_vary and not p.by_feature):
            v_change = load_change(
                v_dot, batch, at, left, head // p.per_value, p.HV, column, p.V, COLUMNS, tl.float32, p
            )
            if gv is not None:
                v_change = tiles.times(v_change, U_v, p_v)
            if gv_dot is not None:
                v_change += U_v_dot * v_tile
            if gates_vary and not p.by_feature:
                v_change += U_dot[:, None] * v_tile.to(tl.float32)
            dot = tiles.add_tokens(dot, k_tile, v_change, U, 1.0, p, True)
        state = tiles.add_tokens(tiles.decayed(state, T, p), k_tile, v_tile, U, 1.0, p, True)
    address, exists = tiles.state_pointers(end_dot, number, row, ROWS, column, COLUMNS, p)
    tl.store(address, dot, mask=exists)


@triton.jit
def outputs_kernel(
    q, k, v, g, gk, gv, g_gamma, q_dot, k_dot, v_dot, g_dot, gk_dot, gv_dot, g_gamma_dot, states, states_dot,
    first, length, chunk, owner,
    o_dot,
    p: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (p.V + BLOCK - 1) // BLOCK
    p_v: tl.constexpr = p.of_values
    gates_vary: tl.constexpr = g_dot is not None or gk_dot is not None or g_gamma_dot is not None
    pid = tl.program_id(0)
    column, head = pid % blocks * BLOCK, pid // blocks % p.H
    number, batch = pid // (blocks * p.H) % p.chunks, pid // (blocks * p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    of_chunk = (batch * p.chunks + number) * p.H + head
    # Sums over all features of keys, a block of them at a time: the tangent of the inter-chunk part, the inter-chunk
    # part itself, and the weights of pairs and their tangents.
    o_tile, inter_chunk = tl.full([p.C, BLOCK], 0.0, tl.float32), tl.full([p.C, BLOCK], 0.0, tl.float32)
    weights, weights_dot = tl.full([p.C, p.C], 0.0, tl.float32), tl.full([p.C, p.C], 0.0, tl.float32)
    for row in tl.range(0, p.D, ROWS, num_stages=1):
        q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p).to(p.dtype)
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p).to(p.dtype)
        q_change = load_change(q_dot, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p.dtype, p)
        k_change = load_change(k_dot, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p.dtype, p)
        gate, G, _, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
        if gates_vary:
            gate_dot, G_dot, _, T_dot = tiles.gates(
                g_dot, gk_dot, g_gamma_dot, batch, at, left, head, row, ROWS, p, True
            )
        else:
            gate_dot, G_dot, T_dot = None, None, None
        state = tiles.load_state(states, of_chunk, row, ROWS, column, BLOCK, p)
        dot = tiles.load_state(states_dot, of_chunk, row, ROWS, column, BLOCK, p)
        o_tile += state_tangents(q_tile, q_change, state, dot, G, G_dot, gates_vary, p)
        if gv_dot is not None:
            inter_chunk += tiles.product(tiles.times(q_tile, G, p).to(p.dtype), state, p)
        weights_dot += pair_tangents(
            q_tile, k_tile, q_change, k_change, gate, G, T, gate_dot, G_dot, T_dot, gates_vary, p
        )
        if v_dot is not None or gv_dot is not None:
            weights += pairs.pair_weights(q_tile, k_tile, gate, G, T, p)

    v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, BLOCK, p).to(p.dtype)
    gates_v, gates_v_dot = None, None
    if gv is not None:
        gates_v = tiles.gates(None, gv, None, batch, at, left, head, column, BLOCK, p_v)
        o_tile = tiles.times(o_tile, gates_v[1], p_v)
    if gv_dot is not None:
        gates_v_dot = tiles.gates(None, gv_dot, None, batch, at, left, head, column, BLOCK, p_v, True)
        o_tile += gates_v_dot[1] * tiles.times(inter_chunk, gates_v[1], p_v)
    o_tile = outputs.add_values(o_tile, weights_dot, v_tile, gates_v, p)
    if v_dot is not None:
        v_change = tiles.load_tile(v_dot, batch, at, left, head // p.per_value, p.HV, column, p.V, BLOCK, p).to(p.dtype)
        o_tile = outputs.add_values(o_tile, weights, v_change, gates_v, p)
    if gv_dot is not None:
        o_tile += value_tangents(weights, v_tile, gates_v, gates_v_dot, p_v)
    tiles.store_tile(o_dot, o_tile * p.scale, batch, at, left, head, p.H, column, p.V, BLOCK, p)


@triton.jit
def state_tangents(q, q_dot, state, state_dot, G, G_dot, gates_vary: tl.constexpr, p: tl.constexpr):
    """exp(G_i) ((q̇_i + Ġ_i q_i)ᵀ h + q_iᵀ ḣ) over a block of features; float32 [C, ·]."""
    if p.by_feature:
        change = q_dot.to(tl.float32)
        if gates_vary:
            change += G_dot * q.to(tl.float32)
        found = tiles.product(tiles.times(change, G, p).to(p.dtype), state, p)
        found += tiles.product(tiles.times(q, G, p).to(p.dtype), state_dot, p)
        return found
    else:
        found = tiles.product(q_dot, state, p) + tiles.product(q, state_dot, p)
        if gates_vary:
            found += G_dot[:, None] * tiles.product(q, state, p)
        return tiles.times(found, G, p)


@triton.jit
def load_change(x_dot, batch, token, length, head, HEADS: tl.constexpr, column, WIDTH: tl.constexpr,
                PADDED: tl.constexpr, DTYPE: tl.constexpr, p: tl.constexpr):  # fmt: skip
    """A tile of a tangent, zeros if the tangent is absent."""
    if x_dot is None:
        return tl.full([p.C, PADDED], 0.0, DTYPE)
    else:
        return tiles.load_tile(x_dot, batch, token, length, head, HEADS, column, WIDTH, PADDED, p).to(DTYPE)


@triton.jit
def pair_tangents(q, k, q_dot, k_dot, gate, G, T, gate_dot, G_dot, T_dot, gates_vary: tl.constexpr, p: tl.constexpr):
    """Ṡ_ij where j ≤ i, else 0; float32."""
    if not p.by_feature:
        weights_dot = tiles.product(q_dot, tl.trans(k), p) + tiles.product(q, tl.trans(k_dot), p)
        if gates_vary:
            weights_dot += tiles.product(q, tl.trans(k), p) * pairs.pair_sums(gate_dot, G_dot, p)
        return weights_dot * pairs.pair_decays(gate, G, p)
    elif p.exact:
        return tangents_by_row(q, k, q_dot, k_dot, gate, G, gate_dot, p)
    else:
        m = pairs.middle(T)
        if pairs.can_factor(G, m, p):
            to_q, to_k = tl.exp(G - m[None, :]), tl.exp(m[None, :] - G)
            q_change, k_change = q_dot.to(tl.float32), k_dot.to(tl.float32)
            if gates_vary:  # relative to the middle of the chunk, so that the terms of i and j, which cancel, are small
                since = G_dot - pairs.middle(T_dot)[None, :]
                q_change += since * q.to(tl.float32)
                k_change -= since * k.to(tl.float32)
            weights_dot = product_in_parts(q_change * to_q, k.to(tl.float32) * to_k, gates_vary, p)
            weights_dot += product_in_parts(q.to(tl.float32) * to_q, k_change * to_k, gates_vary, p)
            weights_dot = tl.where(tiles.causal_mask(p), weights_dot, 0.0)
        else:
            weights_dot = tangents_by_row(q, k, q_dot, k_dot, gate, G, gate_dot, p)
        return weights_dot


@triton.jit
def value_tangents(weights, v, gates, gates_dot, p: tl.constexpr):
    """Σ_j S_ij exp(G_i − G_j) (Ġ_i − Ġ_j) v_j, with G of the features of values."""
    gate, G, _, T = gates
    gate_dot, G_dot, _, T_dot = gates_dot
    m = pairs.middle(T)
    factored = pairs.can_factor(G, m, p) if not p.exact else False
    if factored:  # relative to the middle of the chunk, as above
        since, scaled_v = G_dot - pairs.middle(T_dot)[None, :], tiles.times(v, m[None, :] - G, p)
        found = since * tiles.product(weights, scaled_v, p) - tiles.product(weights, since * scaled_v, p)
        found = tiles.times(found, G - m[None, :], p)
    else:
        rows, found = tl.arange(0, p.C), tl.full(v.shape, 0.0, tl.float32)
        for j in range(p.C):
            row_v, decay = pairs.row_and_decays(j, v, gate, G, p)
            moved = tl.cumsum(tl.where((rows > j)[:, None], gate_dot, 0.0), 0)
            found += tl.sum(tl.where(rows[None, :] == j, weights, 0.0), 1)[:, None] * decay * moved * row_v[None, :]
    return found


@triton.jit
def product_in_parts(a, b, SPLIT: tl.constexpr, p: tl.constexpr):
    """a·bᵀ in float32; with SPLIT, bfloat16 operands are split in two parts each, for sums in which much cancels."""
    b_rounded = b.to(p.dtype)
    total = tl.dot(a.to(p.dtype), tl.trans(b_rounded), input_precision=p.precision)
    if SPLIT and p.dtype == tl.bfloat16:
        a_rest = (a - a.to(p.dtype).to(tl.float32)).to(p.dtype)
        total = tl.dot(a_rest, tl.trans(b_rounded), total)
        total = tl.dot(a.to(p.dtype), tl.trans((b - b_rounded.to(tl.float32)).to(p.dtype)), total)
    return total


@triton.jit
def tangents_by_row(q, k, q_dot, k_dot, gate, G, gate_dot, p: tl.constexpr):
    rows = tl.arange(0, p.C)
    q, k, q_dot, k_dot = q.to(tl.float32), k.to(tl.float32), q_dot.to(tl.float32), k_dot.to(tl.float32)
    weights_dot = tl.full([p.C, p.C], 0.0, tl.float32)
    for j in range(p.C):
        row_k, decay = pairs.row_and_decays(j, k, gate, G, p)
        row_k_dot = tl.sum(tl.where((rows == j)[:, None], k_dot, 0.0), 0)
        pair_j = q_dot * row_k[None, :] + q * row_k_dot[None, :]
        if gate_dot is not None:
            pair_j += q * row_k[None, :] * tl.cumsum(tl.where((rows > j)[:, None], gate_dot, 0.0), 0)
        weights_dot += tl.where(rows[None, :] == j, tl.sum(pair_j * decay, 1)[:, None], 0.0)
    return weights_dot
