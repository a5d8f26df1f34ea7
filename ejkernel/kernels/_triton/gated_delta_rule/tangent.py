"""The tangent: the state and its tangent, chunk after chunk.

The tangents of norms and decays are relative to their values: 1/|k_i| has r_i = −k_i·k̇_i / |k_i|², and exponentials
have those of log decays, Ġ, U̇ (of the rows after) and Ṫ. Hence, with E_ij = exp(G_i − G_j) / (|k_i| |k_j|),

    the rows k_since k have the tangents (r + Ġ) k_since k + k_since k̇, and likewise those of k_until and q_since
    L̇_ij = (β̇_i + β_i (r_i + r_j + Ġ_i − Ġ_j)) E_ij k_i·k_j + β_i E_ij (k̇_i·k_j + k_i·k̇_j), and likewise Ȧ

With held = k_since K h, u = (I + L)⁻¹ x and y = ẋ − L̇ u, the tangents of the equations of `forward` are

    ẋ = β̇ (v − held) + β (v̇ − ḣeld),    ȯ = the tangent of q_since Q h, + Ȧ u + A' y
    ḣ' = the tangent of total h, + (the tangent of k_until K)ᵀ u + K'ᵀ y
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import pairs, tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem, places_of, zero_elsewhere
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig

from . import chunks
from .chunks import Chunks
from .forward import block_of_program


class ChunkTangents(NamedTuple):
    """The tangents of the rows k_since k, k_until k and q_since q [b,s,h,d], and of L and A [b,chunks,h,C,C], in the
    dtype of products; that of total [b,chunks,h] float32.
    """

    k_since: Any
    k_until: Any
    q_since: Any
    lower: Any
    weights: Any
    total: Any


def gated_delta_rule_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: GatedDeltaRuleSpec, config: RecurrenceConfig
) -> Outputs:
    """The tangents of o and the final state; a tangent of None is zero."""
    x = primals
    zeros = {
        name: jnp.zeros_like(a)
        for name, a in x._asdict().items()
        if a is not None and name in ["q", "k", "v", "beta", "g"]
    }
    dot = tangents._replace(**{name: a for name, a in zeros.items() if getattr(tangents, name) is None})
    p = chunks.problem(x, spec, config)
    places = places_of(x, p)
    of = chunks.chunks_of(x, spec, places, p, config, for_gradients=True)
    of_dot = _chunk_tangents(x, dot, of, places, p, spec, config)
    columns = min(config.block_v, p.V_PAD)
    o_dot, final_dot = _launch.launch(
        tangent_kernel,
        *(x.q, x.k, x.v, x.beta, of.k_since, of.q_since, of.total, of.x_to_o, of.x_to_state, of.inverse),
        *(x.initial_state, dot.v, dot.beta, *of_dot, dot.initial_state, *places[:3]),
        out_type=(
            jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), x.v.dtype),
            jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.D, p.V), jnp.float32),
        ),
        grid=p.B * p.sequences * p.H * triton.cdiv(p.V, columns),
        config=config,
        p=p,
        COLUMNS=columns,
    )
    return Outputs(zero_elsewhere(o_dot, places), final_dot)


def _chunk_tangents(
    x: Operands,
    dot: Operands,
    of: Chunks,
    places: Places,
    p: Problem,
    spec: GatedDeltaRuleSpec,
    config: RecurrenceConfig,
) -> ChunkTangents:
    rows_type, pairs_type = of.x_to_state, of.x_to_o
    return _launch.launch(
        chunk_tangents_kernel,
        *(x.q, x.k, x.beta, x.g, dot.q, dot.k, dot.beta, dot.g, of.k_since, of.k_until, of.q_since),
        *(of.total, *places[:4]),
        out_type=jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
            ChunkTangents(rows_type, rows_type, rows_type, pairs_type, pairs_type, of.total),
        ),
        grid=p.B * p.chunks * p.H,
        config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=config.num_warps, num_stages=1),
        p=p,
        NORMALISED=spec.use_qk_l2norm,
    )


@triton.jit
def chunk_tangents_kernel(
    q, k, beta, g, q_dot, k_dot, beta_dot, g_dot, k_since, k_until, q_since, total,
    first, length, chunk, owner,
    k_since_dot, k_until_dot, q_since_dot, lower_dot, weights_dot, total_dot,
    p: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    batch, head, of_chunk, at, left = chunks.chunk_of_program(first, length, chunk, owner, p)
    q_tile, k_tile = chunks.queries_and_keys(q, k, batch, at, left, head, p)
    dq_tile, dk_tile = chunks.queries_and_keys(q_dot, k_dot, batch, at, left, head, p)
    dgate, dG, dU, dT = tiles.gates(g_dot, None, None, batch, at, left, head, 0, 1, p, True)
    q_norm, k_norm = chunks.inverse_norms(q_tile, NORMALISED, p), chunks.inverse_norms(k_tile, NORMALISED, p)
    of_q = relative_to_norms(q_tile, dq_tile, q_norm, NORMALISED, p)
    of_k = relative_to_norms(k_tile, dk_tile, k_norm, NORMALISED, p)
    store_tangents(k_since_dot, k_tile, dk_tile, k_since, of_k + dG, batch, at, left, head, p)
    store_tangents(k_until_dot, k_tile, dk_tile, k_until, of_k + dU, batch, at, left, head, p)
    store_tangents(q_since_dot, q_tile, dq_tile, q_since, of_q + dG, batch, at, left, head, p)
    tl.store(total_dot + of_chunk, tl.load(total + of_chunk) * dT if p.by_head else 0.0)

    decays = chunks.decays_of_pairs(g, batch, at, left, head, p) * k_norm[None, :]
    relative = of_k[None, :] + (pairs.pair_sums(dgate, dG, p) if p.by_head else 0.0)
    beta_rows = chunks.load_rows(beta, batch, at, left, head, p)
    beta_dots = chunks.load_rows(beta_dot, batch, at, left, head, p)
    moved = tiles.product(k_tile, tl.trans(k_tile), p)
    moved *= beta_dots[:, None] + beta_rows[:, None] * (of_k[:, None] + relative)
    of_both = tiles.product(dk_tile, tl.trans(k_tile), p) + tiles.product(k_tile, tl.trans(dk_tile), p)
    moved = (moved + of_both * beta_rows[:, None]) * decays * k_norm[:, None]
    chunks.store_pairs(lower_dot, chunks.strictly_lower(moved, p), of_chunk, p)

    moved = tiles.product(q_tile, tl.trans(k_tile), p) * (of_q[:, None] + relative)
    moved += tiles.product(dq_tile, tl.trans(k_tile), p) + tiles.product(q_tile, tl.trans(dk_tile), p)
    chunks.store_pairs(weights_dot, moved * decays * (q_norm * p.scale)[:, None], of_chunk, p)


@triton.jit
def relative_to_norms(tile, tangent, inverse_norm, NORMALISED: tl.constexpr, p: tl.constexpr):
    """The tangent of 1 / |x| of the rows, relative to it."""
    if NORMALISED:
        return -tl.sum(tile.to(tl.float32) * tangent.to(tl.float32), 1) * inverse_norm * inverse_norm
    else:
        return tl.full([p.C], 0.0, tl.float32)


@triton.jit
def store_tangents(ptr, tile, tangent, factors, relative, batch, at, left, head, p: tl.constexpr):
    """Stores the tangents of the rows of a tile times factors, whose tangents relative to them are given."""
    moved = tile.to(tl.float32) * relative[:, None] + tangent.to(tl.float32)
    moved *= chunks.load_rows(factors, batch, at, left, head, p)[:, None]
    tiles.store_tile(ptr, moved, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p)


@triton.jit
def tangent_kernel(
    q, k, v, beta, k_since, q_since, total, x_to_o, x_to_state, inverse, start,
    v_dot, beta_dot, k_since_dot, k_until_dot, q_since_dot, lower_dot, weights_dot, total_dot, start_dot,
    first, length, chunk,
    o_dot, final_dot,
    p: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column, head, batch, number, token, tokens, first_chunk = block_of_program(first, length, chunk, COLUMNS, p)
    state = tiles.first_state(start, number, 0, p.D_PAD, column, COLUMNS, p)
    dot = tiles.first_state(start_dot, number, 0, p.D_PAD, column, COLUMNS, p)
    # Addresses that stay the same are computed in each chunk: kept over the loop they spill other registers.
    for c in tl.range(0, (tokens + p.C - 1) // p.C, disable_licm=True):
        at, left = token + c * p.C, tokens - c * p.C
        of_chunk = (batch * p.chunks + first_chunk + c) * p.H + head
        h, dh = state.to(p.dtype), dot.to(p.dtype)
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, 0, p.D, p.D_PAD, p).to(p.dtype)
        since = chunks.load_rows(k_since, batch, at, left, head, p)[:, None]
        v_tile = tiles.load_tile(v, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(tl.float32)
        delta = v_tile - tiles.product(k_tile, h, p) * since
        beta_rows = chunks.load_rows(beta, batch, at, left, head, p)[:, None]
        x_tile = beta_rows * delta
        u_tile = chunks.product(tl.load(chunks.pair_pointers(inverse, of_chunk, p)), x_tile, p)

        moved = moved_product(k_tile, k_since_dot, h, dh, since, batch, at, left, head, p)
        y_tile = tiles.load_tile(v_dot, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(tl.float32) - moved
        y_tile = beta_rows * y_tile + chunks.load_rows(beta_dot, batch, at, left, head, p)[:, None] * delta
        y_tile = chunks.add_product(y_tile, -tl.load(chunks.pair_pointers(lower_dot, of_chunk, p)), u_tile, p)

        q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, 0, p.D, p.D_PAD, p).to(p.dtype)
        since = chunks.load_rows(q_since, batch, at, left, head, p)[:, None]
        moved = moved_product(q_tile, q_since_dot, h, dh, since, batch, at, left, head, p)
        moved = chunks.add_product(moved, tl.load(chunks.pair_pointers(weights_dot, of_chunk, p)), u_tile, p)
        moved = chunks.add_product(moved, tl.load(chunks.pair_pointers(x_to_o, of_chunk, p)), y_tile, p)
        tiles.store_tile(o_dot, moved, batch, at, left, head, p.H, column, p.V, COLUMNS, p)

        decay = tl.load(total + of_chunk)
        out_tile = tl.trans(tiles.load_tile(k_until_dot, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p))
        dot = chunks.add_product(dot * decay + state * tl.load(total_dot + of_chunk), out_tile, u_tile, p)
        out_tile = tl.trans(tiles.load_tile(x_to_state, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p))
        dot = chunks.add_product(dot, out_tile, y_tile, p)
        state = chunks.add_product(state * decay, out_tile, x_tile, p)
    address, exists = tiles.state_pointers(final_dot, number, 0, p.D_PAD, column, COLUMNS, p)
    tl.store(address, dot, mask=exists)


@triton.jit
def moved_product(tile, tangents, h, dh, factors, batch, at, left, head, p: tl.constexpr):
    """The tangent of the product of rows times factors with a state h, from the tangents of these rows."""
    moved = tiles.load_tile(tangents, batch, at, left, head, p.H, 0, p.D, p.D_PAD, p)
    return tl.dot(moved, h, tiles.product(tile, dh, p) * factors, input_precision=p.precision)
