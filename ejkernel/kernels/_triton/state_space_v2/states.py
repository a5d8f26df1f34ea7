"""Both passes over the chunks of a head: its states forwards in time, then their cotangents backwards.

    h' = exp(T) h + Σ_j exp(T − G_j) dt_j k_j v_jᵀ,    dh = exp(T) dh' + Σ_i exp(G_i) q_i do_iᵀ

Beside the states in bfloat16, for products, the passes give what the gradients of decays need of states in float32:

    do_i·hᵀq_i,    v_j·dh'ᵀk_j,    Σ h ∘ dh'

each in parts, a part for a block of state. Hence h is kept in two parts, rounded values and their rounding errors.
"""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import splits, tiles
from ejkernel.kernels._triton._recurrence.problem import Places, Problem
from ejkernel.kernels._triton._recurrence.states import WARPS, block_of
from ejkernel.primitives._recurrence import Operands
from ejkernel.types.recurrence import RecurrenceConfig

from .gates import Gates, load_gates, load_total, token_places

STAGES = 2
"""Of a pass: with more there was shared memory for two programs instead of three, 1.1 times the time on an H200."""


def chunk_states(
    x: Operands, gates: Gates, start, places: Places, p: Problem, config: RecurrenceConfig, *, since: bool
) -> tuple:  # fmt: skip
    """h of all chunks [b,chunks,h,d,v] bfloat16, and the final state [b,n,h,e,d] float32; with `since` also the sums of
    log decays before each chunk [b,chunks,h] float32, otherwise None.
    """
    how = dict(backward=False, precise=True, since=since)
    found = _pass(x.k, x.v, None, None, gates, start, None, None, places, p, config, **how)
    return found["states"], found["end"], found.get("since")


def both_passes(
    x: Operands, gates: Gates, do, ends: tuple, names: tuple[str, ...], num_splits: int, places: Places, p: Problem,
    config: RecurrenceConfig,
):  # fmt: skip
    """(h, dh') of all chunks, [b,chunks,h,d,v] bfloat16; the sums for the gradients of decays if g is in `names`, None
    otherwise; and the cotangent of the initial state.

    x, gates and do are split in time; `ends` are the initial state and the cotangent of the final one of sequences.
    """
    (initial_state, dfinal_state), dinitial_state = ends, None
    if num_splits > 1:
        end = lambda a, b, backward: _pass(
            *(a, b, None, None, gates, None, None, None, places, p, config),
            **dict(backward=backward, precise=True, keep=False),
        )["end"]
        enter = partial(splits.entering, gates=(x.g, None, None, None), num_splits=num_splits, p=p)
        initial_state, _ = enter(end(x.k, x.v, False), start=initial_state, backward=False)
        dfinal_state, dinitial_state = enter(end(x.q, do, True), start=dfinal_state, backward=True)
    precise = "initial_state" in names and dinitial_state is None
    run = lambda *given, **how: _pass(*given, places, p, config, with_sums="g" in names, **how)
    of_h = run(x.k, x.v, x.q, do, gates, initial_state, None, None, backward=False, precise=False)
    h = (of_h["states"], of_h["low_part"]) if "g" in names else (None, None)
    of_dh = run(x.q, do, x.k, x.v, gates, dfinal_state, *h, backward=True, precise=precise)
    sums = (of_h.get("sums"), of_dh.get("sums"), of_dh.get("through"))
    return (of_h["states"], of_dh["states"]), sums, of_dh["end"] if dinitial_state is None else dinitial_state


def _pass(
    x, y, a, b, gates: Gates, start, states, low, places: Places, p: Problem, config: RecurrenceConfig,
    *, backward: bool, precise: bool, with_sums: bool = False, keep: bool = True, since: bool = False,
) -> dict:  # fmt: skip
    """The states of chunks with the updates x yᵀ, if they are to `keep`, and the last one; `precise` as in the
    recurrence's `chunk_states`. `with_sums` also b·stateᵀa of each token, `since` the sums of log decays before chunks.
    """
    rows, columns = block_of(p, config)
    blocks = triton.cdiv(p.D, rows) * triton.cdiv(p.V, columns)
    array = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    of_chunks = array(p.B, p.chunks, p.H, p.D, p.V, dtype=jnp.bfloat16)
    types = dict(end=array(p.B, p.sequences, p.H, *p.state))
    types |= dict(states=of_chunks) if keep else {}
    types |= dict(since=array(p.B, p.chunks, p.H)) if since else {}
    if with_sums:
        types |= dict(sums=array(blocks, p.B, p.H, p.S))
        types |= dict(through=array(blocks, p.B, p.chunks, p.H)) if backward else dict(low_part=of_chunks)
    return _launch.launch(
        states_kernel,
        *(x, y, a, b, *gates, start, states, low),
        *places[:3],
        out_type=dict(sorted(types.items())),
        grid=p.B * p.sequences * p.H * blocks,
        config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=WARPS, num_stages=STAGES if with_sums else 1),
        p=p,
        BACKWARD=backward,
        PRECISE=precise,
        PER_KEY=p.per_key,
        ROWS=rows,
        COLUMNS=columns,
        **{name: None for name in ("low_part", "since", "states", "sums", "through") if name not in types},
    )


@triton.jit
def states_kernel(
    x, y, a, b, G, U, dt, start, other, other_low, first, length, chunk,
    end, low_part, since, states, sums, through,
    p: tl.constexpr, BACKWARD: tl.constexpr, PRECISE: tl.constexpr, PER_KEY: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    p_ends: tl.constexpr = p.of_ends
    blocks: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    row_blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    block = pid % (blocks * row_blocks)
    column, row = block % blocks * COLUMNS, block // blocks * ROWS
    pid = pid // (blocks * row_blocks)
    head, n, batch = pid % p.H, pid // p.H % p.sequences, pid // (p.H * p.sequences)
    token, tokens, first_chunk = tiles.sequence_at(batch, n, first, length, chunk, p)
    number, group = (batch * p.sequences + n) * p.H + head, head // PER_KEY
    state = tiles.first_state(start, number, row, ROWS, column, COLUMNS, p_ends)
    chunks, decays = (tokens + p.C - 1) // p.C, 0.0
    if p.chunks == 2:  # a number that Triton 3.6 must not know: it fails to lay out the products for Blackwell
        chunks += tl.program_id(1)
    for i in tl.range(0, chunks):
        c = chunks - 1 - i if BACKWARD else i
        at, left = token + c * p.C, tokens - c * p.C
        of_state = (batch * p.chunks + first_chunk + c) * p.H + head
        high = state.to(p.dtype)
        low = (state - high.to(tl.float32)).to(p.dtype)
        if states is not None:
            kept, inside = tiles.state_pointers(states, of_state, row, ROWS, column, COLUMNS, p)
            tl.store(kept, high, mask=inside)
        if low_part is not None:
            kept, inside = tiles.state_pointers(low_part, of_state, row, ROWS, column, COLUMNS, p)
            tl.store(kept, low, mask=inside)
        if through is not None:
            h = tiles.load_state(other, of_state, row, ROWS, column, COLUMNS, p).to(tl.float32)
            h += tiles.load_state(other_low, of_state, row, ROWS, column, COLUMNS, p).to(tl.float32)
            address = through + tl.cast(block, tl.int64) * (p.B * p.chunks * p.H) + of_state
            tl.store(address, tl.sum(tl.sum(h * state, 1), 0))
        if sums is not None:
            a_tile = tiles.load_tile(a, batch, at, left, group, p.HK, row, p.D, ROWS, p)
            b_tile = tiles.load_tile(b, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
            if BACKWARD:  # a term of ddt by itself, which may be asked for in float32
                rest = (state - high.to(tl.float32) - low.to(tl.float32)).to(p.dtype)
                found = tl.dot(a_tile, high, tl.dot(a_tile, low, tl.dot(a_tile, rest)))
            else:
                found = tl.dot(a_tile, high, tl.dot(a_tile, low))
            here, exists = token_places(batch, at, left, head, p)
            here += tl.cast(block, tl.int64) * (p.B * p.H * p.S)
            tl.store(sums + here, tl.sum(found * b_tile.to(tl.float32), 1), mask=exists)
        x_tile = tiles.load_tile(x, batch, at, left, group, p.HK, row, p.D, ROWS, p)
        y_tile = tiles.load_tile(y, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
        G_tile, U_tile, dt_tile = load_gates(G, U, dt, batch, at, left, head, p)
        T = load_total(G, batch, at, left, head, p)
        if since is not None:
            tl.store(since + of_state, decays)
            decays += T
        exponent, factor = (G_tile, 1.0) if BACKWARD else (U_tile, dt_tile[:, None])
        state = tiles.add_tokens(tiles.decayed(state, T, p), x_tile, y_tile, exponent, factor, p, PRECISE, 2)
    address, exists = tiles.state_pointers(end, number, row, ROWS, column, COLUMNS, p_ends)
    tl.store(address, state, mask=exists)
