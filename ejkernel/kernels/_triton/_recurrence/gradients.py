"""The backward: chunk states forwards in time, their cotangents backwards, then gradients of all chunks in parallel.

With h the initial state of a chunk, dh' the cotangent of its final state, E_ij = exp(G_i − G_j) for j ≤ i and
W_ij = scale do_i·v_j, for each feature d (decays may differ between features):

    dq_i = Σ_j W_ij E_ij k_j + exp(G_i) scale h do_i        dk_j = Σ_i W_ij E_ij q_i + exp(T − G_j) dh' v_j
    dv_j = Σ_i scale S_ij do_i + exp(T − G_j) dh'ᵀ k_j

The decay at row t multiplies all contributions of the rows before t, and of h, to the rows from t on, and to h':

    dg_t = Σ_{j<t≤i} W_ij E_ij q_i k_j + Σ_{i≥t} q_i·[inter-chunk part of dq_i] + Σ_{j<t} k_j·[… of dk_j]
           + exp(T) Σ_e h ∘ dh'

For decays of heads, for fast decays of features, and in float32, these sums are computed as written: nothing cancels,
so that each is as exact as its terms. For slow decays of features the first sum is computed as
Σ_{i≥t} (q_i·[intra-chunk part of dq_i] − k_i·[… of dk_i]), where pairs on one side of t cancel to the last bits of
float32, since both parts are made of the same rounded factors.

If the features of values decay, do_i and v_j have factors exp(G_i) and exp(−G_j), v_j has exp(T − G_j) in the product
with dh', and dh' has exp(T). Everything is then symmetric under the exchange of (q, k, gk) and (do, v, gv) with states
transposed, which gives dv and dgv; the decay of a head is the same decay for all of its features.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.sums import exact_sum

from . import outputs, pairs, splits, tiles
from .configs import WIDE
from .pair_gradients import gate_gradients, pair_gradients
from .problem import Places, Problem, gamma_of_batch, places_of, problem_of, repeated, zero_elsewhere
from .states import ROWS, block_of, chunk_states

MOST_UNSPLIT_FEATURES = 128
"""The most features of keys that one program takes without decays of features; more are split into blocks of `ROWS`."""


def recurrence_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: RecurrenceSpec,
    config: RecurrenceConfig,
) -> tuple:
    """The cotangents of the operands named in `wrt`, in that order.

    The gradient of g_gamma, or of g beside decays of features, is a long sum in which rounding to bfloat16 would not
    average out: it is computed in float32, whatever the blocks of the config.
    """
    wide = "g_gamma" in wrt or ("g" in wrt and primals.gk is not None)
    config = replace(config, **WIDE) if wide else config
    x, do = gamma_of_batch(primals, primals.q.shape[0]), cotangents.o
    do = jnp.zeros((*x.q.shape[:2], max(x.q.shape[2], x.v.shape[2]), x.v.shape[3]), x.q.dtype) if do is None else do
    num_splits, initial_state, dfinal_state = splits.number_of(x), x.initial_state, cotangents.final_state
    if num_splits > 1:
        q, k, v, g, gk, do = (splits.split(a, num_splits) for a in (*x[:5], do))
        x = x._replace(q=q, k=k, v=v, g=g, gk=gk, g_gamma=repeated(x.g_gamma, num_splits))
    p = problem_of(x, spec, config.chunk_size, wide=wide)
    places, gates = places_of(x, p), (x.g, x.gk, x.gv, x.g_gamma)
    dinitial_state, precise = None, "initial_state" in wrt
    if wrt == ("initial_state",):
        how = dict(backward=True, precise=True)
        if num_splits > 1:
            return (splits.initial_states(x.q, do, gates, dfinal_state, num_splits, p, config, **how)[1],)
        return (chunk_states(x.q, do, *gates, dfinal_state, places, p, config, keep=False, **how)[1],)
    if num_splits > 1:
        initial_state, _ = splits.initial_states(
            x.k, x.v, gates, initial_state, num_splits, p, config, backward=False, precise=False
        )
        dfinal_state, dinitial_state = splits.initial_states(
            x.q, do, gates, dfinal_state, num_splits, p, config, backward=True, precise=precise
        )
    states, _ = chunk_states(x.k, x.v, *gates, initial_state, places, p, config, backward=False)
    dstates, last = chunk_states(
        x.q, do, *gates, dfinal_state, places, p, config, backward=True, precise=precise and num_splits == 1
    )
    found = _gradients(x, do, states, dstates, places, {"g", "gk", "gv", "g_gamma"}.intersection(wrt), p, config)
    found = {name: splits.merged(a, num_splits) for name, a in found.items()}
    summed = lambda dg, gate: exact_sum(dg, (0, 1) if gate.shape[0] == 1 else (1,)).reshape(gate.shape)
    gradients = {
        **{name: lambda name=name: found["d" + name] for name in ("q", "k", "v", "g", "gk", "gv")},
        "g_gamma": lambda: summed(found["dg"], primals.g_gamma),
        "initial_state": lambda: last if dinitial_state is None else dinitial_state,
    }
    return tuple(gradients[name]().astype(getattr(x, name).dtype) for name in wrt)


def _gradients(
    x: Operands, do, states, dstates, places: Places, of_gates: set[str], p: Problem, config: RecurrenceConfig
) -> dict[str, jax.Array]:
    """dq, dk and dv; if gates are asked for, dgk and dgv if features decay, and dg if heads do or it is asked for."""
    array = jax.ShapeDtypeStruct
    result_type = lambda a: array((p.B, p.S, p.H, a.shape[3]), a.dtype if a.shape[2] == p.H else jnp.float32)
    gate_gradient_dtype = lambda name: getattr(x, name).dtype if of_gates <= {"gk", "gv"} else jnp.float32
    of_feature = lambda name: {"dgk": array(getattr(x, name).shape, gate_gradient_dtype(name))} if of_gates else {}
    types = {"dk": result_type(x.k), "dq": result_type(x.q)}
    run = lambda given, types, rows, p: _run(given, types, rows, places, p, config)
    given, rows = (x.q, x.k, x.v, do, *x[3:7], states, dstates), min(config.block_k, p.D_PAD)
    if x.gv is not None:  # the same kernel with values and keys exchanged
        found = run(given, types | (of_feature("gk") if p.by_feature else {}), rows, p)
        given = (do, x.v, x.k, x.q, x.g, x.gv, x.gk, x.g_gamma, states, dstates)
        types = {"dk": result_type(x.v), **of_feature("gv")}
        of_values = run(given, types, min(config.block_k, p.V_PAD), p.of_values)
        found |= {{"dk": "dv", "dgk": "dgv"}[name]: a for name, a in of_values.items()}
    elif p.by_feature:  # the decays of all features at once would not fit into registers
        found = run(given, types | of_feature("gk"), rows, p)
    else:
        rows = p.D_PAD if (ROWS if p.exact else MOST_UNSPLIT_FEATURES) >= p.D_PAD else ROWS
        types |= {"dv": result_type(x.v)} if rows == p.D_PAD else {}
        types |= {"dg": array((triton.cdiv(p.D, rows), p.B, p.S, p.H), jnp.float32)} if of_gates else {}
        found = run(given, types, rows, p)
        found |= {"dg": found["dg"].sum(0)} if of_gates else {}
    if "dv" not in found:
        found["dv"] = _of_values(x, do, dstates, result_type(x.v), places, p, config)
    found = {name: zero_elsewhere(a, places) for name, a in found.items()}
    if "dg" not in found and of_gates - {"gk", "gv"}:
        found["dg"] = found["dgk" if p.by_feature else "dgv"].sum(-1)
    for name, a in (("dq", x.q), ("dk", x.k), ("dv", x.v)):
        if a.shape[2] < p.H:
            found[name] = found[name].reshape(*a.shape[:3], -1, a.shape[3]).sum(3)
    return found


def _run(given: tuple, types: dict, rows: int, places: Places, p: Problem, config: RecurrenceConfig) -> dict:
    """Runs gradients_kernel for the results named in `types`, with blocks of `rows` features."""
    return _launch.launch(
        gradients_kernel,
        *(*given, *places[:4]),
        out_type=dict(sorted(types.items())),
        grid=p.B * p.chunks * p.H * triton.cdiv(p.D, rows),
        config=config,
        p=p,
        ROWS=rows,
        COLUMNS=min(config.block_v, p.V_PAD),
        **{name: None for name in ("dg", "dgk", "dk", "dq", "dv") if name not in types},
    )


def _of_values(x: Operands, do, dstates, dv, places: Places, p: Problem, config: RecurrenceConfig) -> jax.Array:
    """dv for each head of the state, if gradients_kernel does not compute it: it takes features of keys in blocks."""
    rows, block = block_of(p, config)
    columns = outputs.columns_of_program(p, block)
    return _launch.launch(
        values_kernel,
        *(x.q, x.k, do, x.g, x.gk, x.g_gamma, dstates),
        *places[:4],
        out_type=dv,
        grid=p.B * p.chunks * p.H * triton.cdiv(p.V, columns),
        config=config,
        p=p,
        ROWS=rows,
        BLOCK=block,
        COLUMNS=columns,
    )


@triton.jit
def values_kernel(
    q, k, do, g, gk, g_gamma, dstates, first, length, chunk, owner,
    dv,
    p: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dv for COLUMNS features of values, a block of them after the other, as sums over blocks of features of keys."""
    programs: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    column, head = pid % programs * COLUMNS, pid // programs % p.H
    number, batch = pid // (programs * p.H) % p.chunks, pid // (programs * p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    of_state = (batch * p.chunks + number) * p.H + head
    if COLUMNS > BLOCK:  # only where features decay
        products = outputs.pairs_over_features(q, k, g, gk, g_gamma, batch, at, left, head, p, ROWS)
        weights = (pairs.decayed_pairs(products, None, None, p) * p.scale).to(p.dtype)
        for column in tl.range(0, p.V, BLOCK, num_stages=1):
            dv_tile = outputs.inter_chunk_over_features(
                q, k, g, gk, g_gamma, dstates, batch, at, left, head, of_state, column, p, ROWS, BLOCK, True
            )
            do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, BLOCK, p).to(p.dtype)
            dv_tile = tl.dot(tl.trans(weights), do_tile, dv_tile, input_precision=p.precision)
            tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, column, p.V, BLOCK, p)
    else:
        products, dv_tile, gate, G = outputs.over_features(
            q, k, g, gk, g_gamma, dstates, batch, at, left, head, of_state, column, p, ROWS, BLOCK, True
        )
        weights = (pairs.decayed_pairs(products, gate, G, p) * p.scale).to(p.dtype)
        do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, BLOCK, p).to(p.dtype)
        dv_tile = tl.dot(tl.trans(weights), do_tile, dv_tile, input_precision=p.precision)
        tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, column, p.V, BLOCK, p)


@triton.jit
def gradients_kernel(
    q, k, v, do, g, gk, gv, g_gamma, states, dstates, first, length, chunk, owner,
    dg, dgk, dk, dq, dv,
    p: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dq, dk, dgk and the partial sum dg for a block of features of keys; dv if the block is all features."""
    p_v: tl.constexpr = p.of_values
    blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    row, head = pid % blocks * ROWS, pid // blocks % p.H
    number, batch = pid // (blocks * p.H) % p.chunks, pid // (blocks * p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    of_state = (batch * p.chunks + number) * p.H + head
    q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, row, p.D, ROWS, p).to(p.dtype)
    k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, row, p.D, ROWS, p).to(p.dtype)
    gate, G, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
    if dv is not None:
        weights = (pairs.pair_weights(q_tile, k_tile, gate, G, T, p) * p.scale).to(p.dtype)
    dweights = tl.full([p.C, p.C], 0.0, tl.float32)
    dq_inter, dk_inter = tl.full([p.C, ROWS], 0.0, tl.float32), tl.full([p.C, ROWS], 0.0, tl.float32)
    state_term = tl.full([ROWS], 0.0, tl.float32)
    for column in tl.range(0, p.V, COLUMNS):
        do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)
        v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, COLUMNS, p).to(p.dtype)
        state = tiles.load_state(states, of_state, row, ROWS, column, COLUMNS, p)
        dstate = tiles.load_state(dstates, of_state, row, ROWS, column, COLUMNS, p)
        if dv is not None:
            dv_tile = outputs.from_state_cotangent(k_tile, dstate, U, p)
            dv_tile = tl.dot(tl.trans(weights), do_tile, dv_tile, input_precision=p.precision)
            tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        if gv is None:
            dweights = tl.dot(do_tile, tl.trans(v_tile), dweights, input_precision=p.precision)
        else:
            gate_v, G_v, U_v, T_v = tiles.gates(None, gv, None, batch, at, left, head, column, COLUMNS, p_v)
            dweights += pairs.pair_products(do_tile, v_tile, gate_v, G_v, T_v, p_v)
            do_tile, v_tile = tiles.times(do_tile, G_v, p_v), tiles.times(v_tile, U_v, p_v)
        dq_inter = tl.dot(do_tile, tl.trans(state), dq_inter, input_precision=p.precision)
        dk_inter = tl.dot(v_tile, tl.trans(dstate), dk_inter, input_precision=p.precision)
        if gv is not None:
            dstate *= tl.exp(T_v)[None, :]
        state_term += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)

    factored = pairs.can_factor(G, pairs.middle(T), p) if p.by_feature and not p.exact else False
    dq_inter, dk_inter = tiles.times(dq_inter, G, p) * p.scale, tiles.times(dk_inter, U, p)
    W = (dweights if gv is None else tl.where(tiles.causal_mask(p), dweights, 0.0)) * p.scale
    dq_tile, dk_tile, dg_intra = pair_gradients(q_tile, k_tile, W, gate, G, T, dq_inter, dk_inter, factored, p)
    if dq is not None:
        tiles.store_tile(dq, dq_tile, batch, at, left, head, p.H, row, p.D, ROWS, p)
    tiles.store_tile(dk, dk_tile, batch, at, left, head, p.H, row, p.D, ROWS, p)
    dq_inter *= q_tile.to(tl.float32)
    dk_inter *= k_tile.to(tl.float32)
    if dgk is not None:
        state_term *= tl.exp(T)
        dgate = gate_gradients(dg_intra, dq_inter, dk_inter, state_term[None, :], factored, p)
        tiles.store_tile(dgk, dgate, batch, at, left, head, p.H, row, p.D, ROWS, p)
    if dg is not None:
        state_term = tl.sum(state_term, 0) * tl.exp(T)
        dgate = gate_gradients(tl.sum(dg_intra, 1), tl.sum(dq_inter, 1), tl.sum(dk_inter, 1), state_term, factored, p)
        dg += tl.cast(row // ROWS, tl.int64) * (p.B * p.S * p.H)
        address, exists = tiles.row_pointers(dg, batch, at, left, head, p)
        tl.store(address, dgate, mask=exists)
