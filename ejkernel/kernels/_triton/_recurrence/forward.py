"""The forward, as one fused kernel that loops over the chunks of a head, or as two: chunk states, then outputs.

The fused kernel keeps the state in registers and reads everything once, but has only as many programs as there are
heads and blocks of columns. The pair of kernels writes the initial state of each chunk to memory and then computes all
chunks in parallel. The output of a chunk has an inter-chunk part, from that state, and an intra-chunk part, from pairs
of rows:

    o_i = scale (exp(G_i) q_iᵀ h + Σ_{j≤i} exp(G_i − G_j) q_i·k_j v_j),    h' = exp(T) h + Σ_j exp(T − G_j) k_j v_jᵀ

If values decay, o_i and v_j also have factors exp(G_i) and exp(−G_j) for each feature of values.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import outputs, pairs, splits, step, tiles
from .problem import StateSpace, gamma_of_batch, places_of, problem_of, repeated, zero_elsewhere
from .states import block_of, chunk_states


def recurrence(*operands, spec=RecurrenceSpec(), config=RecurrenceConfig(), space=StateSpace()) -> Outputs:
    """o and the final state."""
    if config.algorithm == "steps":
        return step.recurrence(*operands, spec=spec, config=config, space=space)
    x = Operands(*operands)
    x = gamma_of_batch(x, x.q.shape[0])
    num_splits = splits.number_of(x)
    if num_splits == 1 and not spec.return_output:
        return _state_alone(x, spec, config, space)
    if num_splits == 1:
        return _of_whole(x, spec, config, space)
    q, k, v, g, gk = (splits.split(a, num_splits) for a in x[:5])
    x = x._replace(q=q, k=k, v=v, g=g, gk=gk, g_gamma=repeated(x.g_gamma, num_splits))
    space = StateSpace(splits.split(space.dt, num_splits), repeated(space.skip, num_splits))
    p = problem_of(x, spec, config.chunk_size, of_space=space.dt is not None)
    gates, how = (x.g, x.gk, x.gv, x.g_gamma), dict(backward=False, precise=spec.return_state, dt=space.dt)
    start, final = splits.initial_states(k, v, gates, x.initial_state, num_splits, p, config, **how)
    if not spec.return_output:
        return Outputs(_no_output(x, num_splits), final)
    o = _of_whole(x._replace(initial_state=start), spec, config, space).o
    return Outputs(splits.merged(o, num_splits), final)


def _state_alone(x: Operands, spec: RecurrenceSpec, config: RecurrenceConfig, space: StateSpace) -> Outputs:
    """The final state, without chunk states and outputs."""
    p = problem_of(x, spec, config.chunk_size, of_space=space.dt is not None)
    how = dict(backward=False, keep=False, precise=spec.return_state, dt=space.dt)
    return Outputs(_no_output(x, 1), chunk_states(*x[1:8], places_of(x, p), p, config, **how)[1])


def _no_output(x: Operands, num_splits: int) -> jax.Array:
    """Zeros in the place of o, of which XLA makes no array where nobody reads them."""
    heads = max(x.q.shape[2], x.v.shape[2])
    shape = (x.q.shape[0] // num_splits, x.q.shape[1] * num_splits, heads, x.v.shape[3])
    return jnp.zeros(shape, x.v.dtype)


def _of_whole(x: Operands, spec: RecurrenceSpec, config: RecurrenceConfig, space: StateSpace) -> Outputs:
    p = problem_of(x, spec, config.chunk_size, of_space=space.dt is not None)
    places = places_of(x, p)
    o_type = jax.ShapeDtypeStruct((p.B, p.S, p.H, p.V), x.v.dtype)
    block = min(config.block_v, p.V_PAD)
    blocks = triton.cdiv(p.V, block)
    if config.algorithm == "fused_chunks":
        o, final = _launch.launch(
            fused_kernel,
            *(*x[:8], *space),
            *places[:3],
            out_type=(o_type, jax.ShapeDtypeStruct((p.B, p.sequences, p.H, *p.state), jnp.float32)),
            grid=p.B * p.sequences * p.H * blocks,
            config=config,
            p=p,
            BLOCK=block,
            BLOCKS=blocks,
            PRECISE=spec.return_state,
        )
    else:
        how = dict(backward=False, precise=spec.return_state, dt=space.dt)
        states, final = chunk_states(*x[1:8], places, p, config, **how)
        columns = block if x.gv is not None else outputs.columns_of_program(p, block)
        o = _launch.launch(
            outputs_kernel,
            *(*x[:7], *space, states),
            *places[:4],
            out_type=o_type,
            grid=p.B * p.chunks * p.H * triton.cdiv(p.V, columns),
            config=config,
            p=p,
            BLOCK=block,
            COLUMNS=columns,
            ROWS=block_of(p, config)[0],
        )
    return Outputs(zero_elsewhere(o, places), final)


@triton.jit
def fused_kernel(
    q, k, v, g, gk, gv, g_gamma, initial, dt, skip, first, length, chunk,
    o, final,
    p: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    p_v: tl.constexpr = p.of_values
    p_ends: tl.constexpr = p.of_ends
    pid = tl.program_id(0)
    column, head = pid % BLOCKS * BLOCK, pid // BLOCKS % p.H
    n, batch = pid // (BLOCKS * p.H) % p.sequences, pid // (BLOCKS * p.H * p.sequences)
    token, tokens, _ = tiles.sequence_at(batch, n, first, length, chunk, p)
    number = (batch * p.sequences + n) * p.H + head
    state = tiles.first_state(initial, number, 0, p.D_PAD, column, BLOCK, p_ends)
    for start in tl.range(0, tokens, p.C):
        at, left = token + p.step * start, tokens - start
        q_tile = tiles.load_tile(q, batch, at, left, head // p.per_query, p.HQ, 0, p.D, p.D_PAD, p).to(p.dtype)
        k_tile = tiles.load_tile(k, batch, at, left, head // p.per_key, p.HK, 0, p.D, p.D_PAD, p).to(p.dtype)
        v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, BLOCK, p).to(p.dtype)
        gate, G, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, 0, p.D_PAD, p)
        products = pairs.pair_products(q_tile, k_tile, gate, G, T, p)
        inter_chunk = outputs.from_state(q_tile, state.to(p.dtype), G, p)
        o_tile = outputs.chunk_outputs(
            products, inter_chunk, v_tile, gate, G, gv, dt, skip, batch, at, left, head, column, p
        )
        tiles.store_tile(o, o_tile, batch, at, left, head, p.H, column, p.V, BLOCK, p)
        factor = 1.0
        if dt is not None:
            factor = tiles.load_row_factors(dt, batch, at, left, head, p)
        if gv is not None:
            gates_v = tiles.gates(None, gv, None, batch, at, left, head, column, BLOCK, p_v)
            v_tile = tiles.times(v_tile, gates_v[2], p_v)
            state *= tl.exp(gates_v[3])[None, :]
        state = tiles.add_tokens(tiles.decayed(state, T, p), k_tile, v_tile, U, factor, p, PRECISE)
    address, exists = tiles.state_pointers(final, number, 0, p.D_PAD, column, BLOCK, p_ends)
    tl.store(address, state, mask=exists)


@triton.jit
def outputs_kernel(
    q, k, v, g, gk, gv, g_gamma, dt, skip, states, first, length, chunk, owner,
    o,
    p: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """o for COLUMNS features of values, a block of them after the other."""
    programs: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    column, head = pid % programs * COLUMNS, pid // programs % p.H
    number, batch = pid // (programs * p.H) % p.chunks, pid // (programs * p.H * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    of_chunk = (batch * p.chunks + number) * p.H + head
    if COLUMNS > BLOCK:  # only where features of keys decay, and not those of values
        products = outputs.pairs_over_features(q, k, g, gk, g_gamma, batch, at, left, head, p, ROWS)
        weights = pairs.decayed_pairs(products, None, None, p) * p.scale
        for column in tl.range(0, p.V, BLOCK, num_stages=1):
            inter_chunk = outputs.inter_chunk_over_features(
                q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, column, p, ROWS, BLOCK, False
            )
            v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, BLOCK, p).to(p.dtype)
            o_tile = outputs.add_values(inter_chunk, weights, v_tile, None, p)
            tiles.store_tile(o, o_tile, batch, at, left, head, p.H, column, p.V, BLOCK, p)
    else:
        products, inter_chunk, gate, G = outputs.over_features(
            q, k, g, gk, g_gamma, states, batch, at, left, head, of_chunk, column, p, ROWS, BLOCK, False
        )
        v_tile = tiles.load_tile(v, batch, at, left, head // p.per_value, p.HV, column, p.V, BLOCK, p).to(p.dtype)
        o_tile = outputs.chunk_outputs(
            products, inter_chunk, v_tile, gate, G, gv, dt, skip, batch, at, left, head, column, p
        )
        tiles.store_tile(o, o_tile, batch, at, left, head, p.H, column, p.V, BLOCK, p)
