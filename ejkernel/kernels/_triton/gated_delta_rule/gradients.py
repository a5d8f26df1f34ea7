"""The gradients of a chunk, from the state h before it, the cotangent dh' of the state after it, deltas and dx.

With u = (I + L)⁻¹ β delta, E_ij = exp(G_i − G_j) / |k_j|, dA = do uᵀ for j ≤ i and dL = −dx uᵀ for j < i,

    dq = q_since do hᵀ + S K,                                        S_ij = dA_ij scale E_ij / |q_i|
    dk = k_until u dh'ᵀ − k_since β dx hᵀ + Sᵀ Q + (M + Mᵀ) K,       M_ij = dL_ij β_i E_ij / |k_i|
    dβ_i = dx_i·delta_i + Σ_j dL_ij L_ij / β_i

are those of q and k as factors of products. Their norms depend on them, too: dq − q (q·dq) / |q|² is the gradient,
and likewise that of k. The decay at row t multiplies the contributions of the rows before it, and of h, to those from
t on, and to h':

    dg_t = Σ_{j<t≤i} (dA_ij A_ij + dL_ij L_ij) + Σ_{i≥t} (q_i·[first term of dq_i] + k_i·[second term of dk_i])
           + Σ_{j<t} k_j·[first term of dk_j] + total Σ h ∘ dh'

computed as written, so that nothing cancels. One kernel computes what pairs of rows contribute, another, for blocks of
features, what states do.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands
from ejkernel.types.recurrence import RecurrenceConfig

from . import chunks
from .chunks import Chunks
from .configs import has_mma_sync

FEATURES = 64
"""The most features of keys in a block."""


def columns_of(p: Problem) -> int:
    """The columns of states that a program takes at once."""
    return min(64 if p.dtype == tl.bfloat16 else 32, p.V_PAD)


def in_parallel(p: Problem, num_stages: int, most_features: int = 128) -> RecurrenceConfig:
    """How the kernels of single chunks run, whatever is best for those that go from chunk to chunk.

    The registers of four warps hold tiles of up to `most_features`.
    """
    half = p.dtype == tl.bfloat16
    return RecurrenceConfig(
        chunk_size=p.C, num_warps=4 if half and most_features >= p.D_PAD else 8, num_stages=num_stages if half else 1
    )


def gradients_of_chunks(
    x: Operands,
    do: jax.Array,
    of: Chunks,
    forwards: dict[str, jax.Array],
    backwards: dict[str, jax.Array],
    places: Places,
    p: Problem,
    spec: GatedDeltaRuleSpec,
) -> dict[str, Any]:
    """Those of q, k, beta and g (None without it), with anything for tokens of no sequence."""
    by_pairs = _of_pairs(x, do, of, forwards["deltas"], backwards["dx"], places, p, spec)
    by_states = _of_states(x, do, of, forwards["states"], backwards, by_pairs, places, p)
    gradients = dict(q=by_states["dq"], k=by_states["dk"], beta=by_pairs["dbeta"] + backwards["dx_delta"].sum(0))
    if spec.use_qk_l2norm:
        gradients |= {name: _with_norms(gradients[name], getattr(x, name)) for name in ("q", "k")}
    return gradients | dict(g=None if x.g is None else by_pairs["dg"] + by_states["dg"].sum(0))


def _with_norms(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """The gradient of x, from that of x as the factor of 1 / |x|."""
    x = x.astype(jnp.float32)
    along = (x * gradient).sum(-1, keepdims=True) / ((x * x).sum(-1, keepdims=True) + chunks.NORM_EPSILON.value)
    return gradient - x * along


def _of_pairs(x, do, of: Chunks, deltas, dx, places: Places, p: Problem, spec) -> dict[str, jax.Array]:
    """The parts of dbeta and dg [b,s,h]; S and M + Mᵀ [b,chunks,h,C,C] and u [b,s,h,e] in the dtype of products."""
    pairs_type = chunks.pairs_type(p, chunks.kept_dtype(p))
    types = dict(dbeta=chunks.rows_type(p), dg=chunks.rows_type(p), dlower=pairs_type, dweights=pairs_type)
    types |= dict(u=jax.ShapeDtypeStruct(deltas.shape, deltas.dtype))
    return _launch.launch(
        pairs_kernel,
        *(x.q, x.k, x.beta, x.g, do, of.inverse, deltas, dx, *places[:4]),
        out_type=types,
        grid=p.B * p.chunks * p.H,
        config=in_parallel(p, 1, most_features=64 if has_mma_sync(gpu_target()) else 128),
        p=p,
        COLUMNS=columns_of(p),
        NORMALISED=spec.use_qk_l2norm,
    )


def _of_states(x, do, of: Chunks, states, backwards, by_pairs, places: Places, p: Problem) -> dict[str, Any]:
    """dq and dk [b,s,g,d] and parts of dg [blocks,b,s,h], float32."""
    rows = min(FEATURES, p.D_PAD)
    blocks = triton.cdiv(p.D, rows)
    heads = jax.ShapeDtypeStruct((p.B, p.S, p.HQ, p.D), jnp.float32)
    return _launch.launch(
        states_kernel,
        *(x.q, x.k, x.beta, do, of.k_since, of.k_until, of.q_since, of.total, states, by_pairs["u"]),
        *(backwards["dstates"], backwards["dx"], by_pairs["dweights"], by_pairs["dlower"], *places[:4]),
        out_type=dict(dg=jax.ShapeDtypeStruct((blocks, p.B, p.S, p.H), jnp.float32), dk=heads, dq=heads),
        grid=p.B * p.chunks * p.HQ * blocks,
        config=in_parallel(p, _stages_of_states(p)),
        p=p,
        ROWS=rows,
        COLUMNS=columns_of(p),
    )


def _stages_of_states(p: Problem) -> int:
    """Two where there is a block of columns to load ahead; for only one, registers spill with tcgen05."""
    is_one = columns_of(p) >= p.V and not has_mma_sync(gpu_target())
    return 1 if _launch.is_rocm() or is_one else 2


@triton.jit
def pairs_kernel(
    q, k, beta, g, do, inverse, deltas, dx, first, length, chunk, owner,
    dbeta, dg, dlower, dweights, u,
    p: tl.constexpr, COLUMNS: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    batch, head, of_chunk, at, left = chunks.chunk_of_program(first, length, chunk, owner, p)
    beta_rows = chunks.load_rows(beta, batch, at, left, head, p)
    inverse_tile = tl.load(chunks.pair_pointers(inverse, of_chunk, p))
    do_u, dx_u = tl.full([p.C, p.C], 0.0, tl.float32), tl.full([p.C, p.C], 0.0, tl.float32)
    for column in tl.range(0, p.V, COLUMNS):
        do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)
        dx_tile = tiles.load_tile(dx, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        delta = tiles.load_tile(deltas, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(tl.float32)
        u_tile = chunks.product(inverse_tile, delta * beta_rows[:, None], p).to(p.dtype)
        tiles.store_tile(u, u_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        do_u = tl.dot(do_tile, tl.trans(u_tile), do_u, input_precision=p.precision)
        dx_u = tl.dot(dx_tile, tl.trans(u_tile), dx_u, input_precision=p.precision)

    q_tile, k_tile = chunks.queries_and_keys(q, k, batch, at, left, head, p)
    q_norm, k_norm = chunks.inverse_norms(q_tile, NORMALISED, p), chunks.inverse_norms(k_tile, NORMALISED, p)
    decays = chunks.decays_of_pairs(g, batch, at, left, head, p) * k_norm[None, :]
    do_u *= decays * (q_norm * p.scale)[:, None]
    dx_u = -chunks.strictly_lower(dx_u * decays * k_norm[:, None], p)
    chunks.store_pairs(dweights, do_u, of_chunk, p)
    do_u *= tiles.product(q_tile, tl.trans(k_tile), p)  # dA A
    dkey_products = dx_u * tiles.product(k_tile, tl.trans(k_tile), p)  # dL L / β
    chunks.store_rows(dbeta, tl.sum(dkey_products, 1), batch, at, left, head, p)
    dg_pairs = tl.cumsum(do_u + dkey_products * beta_rows[:, None], 0, reverse=True)  # [t,j]: the sum over i ≥ t
    chunks.store_rows(dg, tl.sum(chunks.strictly_lower(dg_pairs, p), 1), batch, at, left, head, p)
    dx_u *= beta_rows[:, None]
    chunks.store_pairs(dlower, dx_u + tl.trans(dx_u), of_chunk, p)


@triton.jit
def states_kernel(
    q, k, beta, do, k_since, k_until, q_since, total, states, u, dstates, dx, dweights, dlower,
    first, length, chunk, owner,
    dg, dk, dq,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    block, of_keys = pid % blocks, pid // blocks % p.HQ
    number, batch = pid // (blocks * p.HQ) % p.chunks, pid // (blocks * p.HQ * p.chunks)
    row = block * ROWS
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    q_tile = tiles.load_tile(q, batch, at, left, of_keys, p.HQ, row, p.D, ROWS, p).to(p.dtype)
    k_tile = tiles.load_tile(k, batch, at, left, of_keys, p.HQ, row, p.D, ROWS, p).to(p.dtype)
    dq_tile, dk_tile = tl.full([p.C, ROWS], 0.0, tl.float32), tl.full([p.C, ROWS], 0.0, tl.float32)
    for head in tl.range(of_keys * p.per_query, (of_keys + 1) * p.per_query):
        of_chunk = (batch * p.chunks + number) * p.H + head
        do_h, dx_h, u_dh, of_states = products_of_states(
            do, dx, u, states, dstates, batch, at, left, head, of_chunk, row, p, ROWS, COLUMNS
        )
        do_h *= chunks.load_rows(q_since, batch, at, left, head, p)[:, None]
        u_dh *= chunks.load_rows(k_until, batch, at, left, head, p)[:, None]
        factor = chunks.load_rows(k_since, batch, at, left, head, p) * chunks.load_rows(beta, batch, at, left, head, p)
        dx_h *= -factor[:, None]
        since = tl.sum(do_h * q_tile.to(tl.float32), 1) + tl.sum(dx_h * k_tile.to(tl.float32), 1)
        until = tl.sum(u_dh * k_tile.to(tl.float32), 1)
        dgate = tl.cumsum(since, 0, reverse=True) + tl.cumsum(until, 0) - until + of_states * tl.load(total + of_chunk)
        of_block = dg + tl.cast(block, tl.int64) * (p.B * p.S * p.H)
        chunks.store_rows(of_block, dgate, batch, at, left, head, p)
        of_weights = tl.load(chunks.pair_pointers(dweights, of_chunk, p))
        of_lower = tl.load(chunks.pair_pointers(dlower, of_chunk, p))
        dq_tile = tl.dot(of_weights, k_tile, dq_tile + do_h, input_precision=p.precision)
        dk_tile = tl.dot(of_lower, k_tile, dk_tile + u_dh + dx_h, input_precision=p.precision)
        dk_tile = tl.dot(tl.trans(of_weights), q_tile, dk_tile, input_precision=p.precision)
    tiles.store_tile(dq, dq_tile, batch, at, left, of_keys, p.HQ, row, p.D, ROWS, p)
    tiles.store_tile(dk, dk_tile, batch, at, left, of_keys, p.HQ, row, p.D, ROWS, p)


@triton.jit
def products_of_states(
    do, dx, u, states, dstates, batch, at, left, head, of_chunk, row,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """do hᵀ, dx hᵀ and u dh'ᵀ [C,ROWS], and the sum of h ∘ dh', for a block of features of keys."""
    do_h, dx_h = tl.full([p.C, ROWS], 0.0, tl.float32), tl.full([p.C, ROWS], 0.0, tl.float32)
    u_dh, of_states = tl.full([p.C, ROWS], 0.0, tl.float32), tl.full([ROWS], 0.0, tl.float32)
    for column in tl.range(0, p.V, COLUMNS):
        do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)
        dx_tile = tiles.load_tile(dx, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        u_tile = tiles.load_tile(u, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        state = tiles.load_state(states, of_chunk, row, ROWS, column, COLUMNS, p)
        dstate = tiles.load_state(dstates, of_chunk, row, ROWS, column, COLUMNS, p)
        do_h = tl.dot(do_tile, tl.trans(state), do_h, input_precision=p.precision)
        dx_h = tl.dot(dx_tile, tl.trans(state), dx_h, input_precision=p.precision)
        u_dh = tl.dot(u_tile, tl.trans(dstate), u_dh, input_precision=p.precision)
        of_states += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    return do_h, dx_h, u_dh, tl.sum(of_states, 0)
