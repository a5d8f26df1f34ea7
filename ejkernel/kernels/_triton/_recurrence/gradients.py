"""The backward: states forwards, their cotangents backwards in time, then all chunks at once.

With h the state that a chunk begins with, dh' the cotangent of the one it ends with, E_ij = exp(G_i − G_j) for j ≤ i
and W_ij = scale do_i·v_j, of a feature d (of the exponentials there may be one for each):

    dq_i = Σ_j W_ij E_ij k_j + exp(G_i) scale h do_i        dk_j = Σ_i W_ij E_ij q_i + exp(T − G_j) dh' v_j
    dv_j = Σ_i scale S_ij do_i + exp(T − G_j) dh'ᵀ k_j

A decay at row t is a factor of what passes from rows before t (or the state) to row t and those behind it (or dh'):

    dg_t = Σ_{j<t≤i} W_ij E_ij q_i k_j + Σ_{i≥t} q_i·[state part of dq_i] + Σ_{j<t} k_j·[dh' part of dk_j]
           + exp(T) Σ_e h ∘ dh'

The first sum is Σ_{i≥t} (q_i·[first part of dq_i] − k_i·[first part of dk_i]): pairs that do not pass t cancel, to the
last bits of float32, as both parts are made of the same rounded factors. The others have no terms that cancel.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import KernelConfig

from . import segments, tiles
from .problem import Places, Problem, gamma_of_batch, places_of, problem_of, repeated, zero_elsewhere
from .states import chunk_states


def recurrence_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: RecurrenceSpec,
    config: KernelConfig,
) -> tuple:
    """The cotangents of the operands that `wrt` names, in that order."""
    x, do = gamma_of_batch(primals), cotangents.o
    do = jnp.zeros((*x.q.shape[:3], x.v.shape[3]), x.q.dtype) if do is None else do
    parts, start, dend = segments.number_of(x), x.initial_state, cotangents.final_state
    if parts > 1:
        q, k, v, g, gk, do = (segments.cut(a, parts) for a in (*x[:5], do))
        x = x._replace(q=q, k=k, v=v, g=g, gk=gk, g_gamma=repeated(x.g_gamma, parts))
    p = problem_of(x, spec, config.block_q)
    places, gates = places_of(x, p), (x.g, x.gk, x.g_gamma)
    dstart = None
    if parts > 1:
        start, _ = segments.starts(x.k, x.v, gates, start, parts, p, config, backward=False)
        dend, dstart = segments.starts(x.q, do, gates, dend, parts, p, config, backward=True)
    states, _ = chunk_states(x.k, x.v, *gates, start, places, p, config, backward=False)
    dstates, last = chunk_states(x.q, do, *gates, dend, places, p, config, backward=True)
    found = _gradients(x, do, states, dstates, places, {"g", "gk", "g_gamma"}.intersection(wrt), p, config)
    found = {name: segments.joined(a, parts) for name, a in found.items()}
    summed = lambda dg, like: dg.sum((0, 1) if like.shape[0] == 1 else 1).reshape(like.shape)
    gradients = {
        **{name: lambda name=name: found["d" + name] for name in ("q", "k", "v", "g", "gk")},
        "g_gamma": lambda: summed(found["dg"], primals.g_gamma),
        "initial_state": lambda: last if dstart is None else dstart,
    }
    return tuple(gradients[name]().astype(getattr(x, name).dtype) for name in wrt)


def _gradients(
    x: Operands, do, states, dstates, places: Places, of_gates: set[str], p: Problem, config: KernelConfig
) -> dict[str, jax.Array]:
    """dq, dk, dv; of gates, dgk where features decay and dg where heads do or where it is asked for."""
    like = lambda heads, a: jax.ShapeDtypeStruct(
        (p.B, p.S, heads, a.shape[3]), a.dtype if p.group == 1 else jnp.float32
    )
    of_head = jax.ShapeDtypeStruct((p.B, p.S, p.H), jnp.float32)
    types = {"dg": of_head, "dk": like(p.H, x.k), "dq": x.q, "dv": like(p.H, x.v)}
    if x.gk is not None:
        types["dgk"] = x.gk if of_gates == {"gk"} else jax.ShapeDtypeStruct(x.gk.shape, jnp.float32)

    def launched(*asked, rows=p.D_PAD):
        return _launch.launch(
            gradients_kernel,
            *(x.q, x.k, x.v, do, x.g, x.gk, x.g_gamma, states, dstates),
            *places[:4],
            out_type={n: jax.ShapeDtypeStruct(types[n].shape, types[n].dtype) for n in asked},
            grid=p.B * p.chunks * p.H * triton.cdiv(p.D, rows),
            config=config,
            p=p,
            ROWS=rows,
            **{n: None for n in ("dg", "dgk", "dk", "dq", "dv") if n not in asked},
        )

    if p.by_feature:  # the decays of all features at once would not fit into registers
        gate = ("dgk",) if of_gates else ()
        found = launched("dv") | launched("dq", "dk", *gate, rows=min(config.block_d, p.D_PAD))
    else:
        found = launched("dq", "dk", "dv", *(("dg",) if of_gates else ()))
    found = {name: zero_elsewhere(a, places) for name, a in found.items()}
    if p.by_feature and of_gates - {"gk"}:
        found["dg"] = found["dgk"].sum(-1)
    if p.group > 1:
        of_groups = lambda a: a.reshape(p.B, p.S, p.G, p.group, -1).sum(3)
        found |= {"dk": of_groups(found["dk"]), "dv": of_groups(found["dv"])}
    return found


@triton.jit
def gradients_kernel(
    q, k, v, do, g, gk, g_gamma, states, dstates, first, length, chunk, owner,
    dg, dgk, dk, dq, dv,
    p: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A block of features of dq, dk and the gates; of dv, for which the block must be of all features."""
    blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    row, head = pid % blocks * ROWS, pid // blocks % p.H
    number, batch = pid // (blocks * p.H) % p.chunks, pid // (blocks * p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    kv_head = head // p.group
    q_tile = tiles.load_tile(q, batch, at, left, head, p.H, row, p.D, ROWS, p).to(p.dtype)
    k_tile = tiles.load_tile(k, batch, at, left, kv_head, p.G, row, p.D, ROWS, p).to(p.dtype)
    do_tile = tiles.load_tile(do, batch, at, left, head, p.H, 0, p.V, p.V_PAD, p).to(p.dtype)
    gate, G, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
    of_state = (batch * p.chunks + number) * p.H + head
    address, exists = tiles.state_pointers(dstates, of_state, row, ROWS, 0, p.V_PAD, p)
    dstate = tl.load(address, mask=exists, other=0.0)

    if dv is not None:
        weights = (tiles.pair_weights(q_tile, k_tile, gate, G, T, p) * p.scale).to(p.dtype)
        if p.by_feature:
            dv_tile = tiles.product(tiles.times(k_tile, U, p).to(p.dtype), dstate, p)
        else:
            dv_tile = tiles.times(tiles.product(k_tile, dstate, p), U, p)
        dv_tile = tl.dot(tl.trans(weights), do_tile, dv_tile, input_precision=p.precision)
        tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, 0, p.V, p.V_PAD, p)

    if dq is not None:
        v_tile = tiles.load_tile(v, batch, at, left, kv_head, p.G, 0, p.V, p.V_PAD, p).to(p.dtype)
        dweights = tiles.product(do_tile, tl.trans(v_tile), p) * p.scale
        dq_tile, dk_tile, change = pair_gradients(q_tile, k_tile, dweights, gate, G, T, p)
        part = tiles.times(tiles.product(v_tile, tl.trans(dstate), p), U, p)
        dk_tile += part
        tiles.store_tile(dk, dk_tile, batch, at, left, head, p.H, row, p.D, ROWS, p)
        passing = k_tile.to(tl.float32) * part
        address, exists = tiles.state_pointers(states, of_state, row, ROWS, 0, p.V_PAD, p)
        state = tl.load(address, mask=exists, other=0.0)
        part = tiles.times(tiles.product(do_tile, tl.trans(state), p), G, p) * p.scale
        dq_tile += part
        tiles.store_tile(dq, dq_tile, batch, at, left, head, p.H, row, p.D, ROWS, p)
        change += q_tile.to(tl.float32) * part
        through = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        if dgk is not None:
            dgate = gate_gradients(change, passing, (through * tl.exp(T))[None, :], p)
            tiles.store_tile(dgk, dgate, batch, at, left, head, p.H, row, p.D, ROWS, p)
        if dg is not None:
            dgate = gate_gradients(tl.sum(change, 1), tl.sum(passing, 1), tl.sum(through, 0) * tl.exp(T), p)
            rows = tl.arange(0, p.C)
            of_row = (tl.cast(batch, tl.int64) * p.S + at) * p.H + head + rows * (p.step * p.H)
            tl.store(dg + of_row, dgate, mask=rows < left)


@triton.jit
def gate_gradients(change, passing, through, p: tl.constexpr):
    """Σ_{i≥t} change_i + Σ_{j<t} passing_j + through."""
    if p.exact:
        return tl.cumsum(change, 0, reverse=True) + (tl.cumsum(passing, 0) - passing) + through
    else:
        before = passing - change
        return tl.sum(change, 0) + (tl.cumsum(before, 0) - before) + through


@triton.jit
def pair_gradients(q, k, W, gate, G, T, p: tl.constexpr):
    """The parts of dq and dk that come from pairs within the chunk, and q ∘ the first less k ∘ the second.

    The latter is of pairs j < i alone: those of j = i pass no decay.
    """
    rows = tl.arange(0, p.C)
    of_itself = tl.sum(tl.where(rows[:, None] == rows[None, :], W, 0.0), 1)[:, None]
    W = tl.where(rows[:, None] > rows[None, :], W, 0.0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    if p.by_feature:
        m = tiles.middle(T)
        if tiles.is_near(G, m, p):
            W_tile = W.to(p.dtype)
            near_q = (wide_q * tl.exp(G - m[None, :])).to(p.dtype)
            near_k = (wide_k * tl.exp(m[None, :] - G)).to(p.dtype)
            dq, dk = tiles.product(W_tile, near_k, p), tiles.product(tl.trans(W_tile), near_q, p)
            change = near_q.to(tl.float32) * dq - near_k.to(tl.float32) * dk
            dq *= tl.exp(G - m[None, :])
            dk *= tl.exp(m[None, :] - G)
        else:
            dq, dk = far_gradients(wide_q, wide_k, W, gate, p)
            change = wide_q * dq - wide_k * dk
    else:
        W_tile = (W * tiles.pair_decays(gate, G, p)).to(p.dtype)
        dq, dk = tiles.product(W_tile, k, p), tiles.product(tl.trans(W_tile), q, p)
        change = wide_q * dq - wide_k * dk
    return dq + of_itself * wide_k, dk + of_itself * wide_q, change


@triton.jit
def far_gradients(q, k, W, gate, p: tl.constexpr):
    rows = tl.arange(0, p.C)
    dq, dk = tl.zeros_like(q), tl.zeros_like(q)
    for j in range(p.C):
        row_k, decay = tiles.row_and_decays(j, k, gate, p)
        W_j = tl.sum(tl.where(rows[None, :] == j, W, 0.0), 1)[:, None]
        dq += W_j * row_k[None, :] * decay
        dk += tl.where((rows == j)[:, None], tl.sum(W_j * q * decay, 0)[None, :], 0.0)
    return dq, dk
