"""The initial state of each chunk, or, backwards in time, the cotangent of the final state of each chunk.

h' = exp(T) h + Σ_j exp(T − G_j) k_j v_jᵀ,    dh = exp(T) dh' + Σ_i exp(G_i) scale q_i do_iᵀ

If values decay, the columns of the state do too, and v_j and do_i have the same factors as k_j and q_i.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton import _launch
from ejkernel.types.recurrence import RecurrenceConfig

from . import tiles
from .problem import Places, Problem

WARPS = 4
ROWS = 64
"""The least rows of a block of state in products of bfloat16: these fill a matrix unit."""


def chunk_states(
    x, y, g, gk, gv, g_gamma, start, places: Places, p: Problem, config: RecurrenceConfig,
    *, backward: bool, keep: bool = True, precise: bool = False, dt=None,
):  # fmt: skip
    """The chunk states [b,chunks,h,d,v] in the dtype of products, and the state at the end [b,n,h,d,v] float32.

    x and y are k and v, or backwards q and the cotangent of o. `start` is the state at the beginning, None for zeros.
    Without `keep` chunk states are not stored, and None. `precise` makes the last state as exact as float32, for use as
    a result. `dt` holds factors of v.
    """
    rows, columns = block_of(p, config)
    dtype = jnp.bfloat16 if p.dtype == tl.bfloat16 else jnp.float32
    end = jax.ShapeDtypeStruct((p.B, p.sequences, p.H, *p.state), jnp.float32)
    found = _launch.launch(
        states_kernel,
        *(x, y, g, gk, gv, g_gamma, start, dt),
        *places[:3],
        out_type=(jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.D, p.V), dtype), end) if keep else (end,),
        grid=p.B * p.sequences * p.H * triton.cdiv(p.D, rows) * triton.cdiv(p.V, columns),
        config=RecurrenceConfig(chunk_size=config.chunk_size, num_warps=WARPS, num_stages=config.num_stages),
        p=p,
        BACKWARD=backward,
        X_HEADS=x.shape[2],
        Y_HEADS=y.shape[2],
        ROWS=rows,
        COLUMNS=columns,
        PRECISE=precise,
        **({} if keep else {"states": None}),
    )
    return found if keep else (None, *found)


def block_of(p: Problem, config: RecurrenceConfig) -> tuple[int, int]:
    """The rows and columns of the block of state in a program that has little else in registers."""
    rows = max(ROWS, config.block_k) if p.dtype == tl.bfloat16 else config.block_k
    return min(rows, p.D_PAD), min(config.block_v, p.V_PAD)


@triton.jit
def states_kernel(
    x, y, g, gk, gv, g_gamma, start, dt, first, length, chunk,
    states, end,
    p: tl.constexpr, BACKWARD: tl.constexpr, X_HEADS: tl.constexpr, Y_HEADS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    p_v: tl.constexpr = p.of_values
    p_ends: tl.constexpr = p.of_ends
    blocks: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    row_blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    column, row = pid % blocks * COLUMNS, pid // blocks % row_blocks * ROWS
    pid = pid // (blocks * row_blocks)
    head, n, batch = pid % p.H, pid // p.H % p.sequences, pid // (p.H * p.sequences)
    token, tokens, first_chunk = tiles.sequence_at(batch, n, first, length, chunk, p)
    number = (batch * p.sequences + n) * p.H + head
    state = tiles.first_state(start, number, row, ROWS, column, COLUMNS, p_ends)
    x_head, y_head = head // (p.H // X_HEADS), head // (p.H // Y_HEADS)
    chunks = (tokens + p.C - 1) // p.C
    for i in tl.range(0, chunks):
        c = chunks - 1 - i if BACKWARD else i
        at, left = token + p.step * (c * p.C), tokens - c * p.C
        if states is not None:
            number_of_chunk = (batch * p.chunks + first_chunk + c) * p.H + head
            kept, inside = tiles.state_pointers(states, number_of_chunk, row, ROWS, column, COLUMNS, p)
            tl.store(kept, state.to(states.dtype.element_ty), mask=inside)
        x_tile = tiles.load_tile(x, batch, at, left, x_head, X_HEADS, row, p.D, ROWS, p)
        y_tile = tiles.load_tile(y, batch, at, left, y_head, Y_HEADS, column, p.V, COLUMNS, p)
        _, G, U, T = tiles.gates(g, gk, g_gamma, batch, at, left, head, row, ROWS, p)
        exponent, factor = (G, p.scale) if BACKWARD else (U, 1.0)
        if dt is not None:
            factor = tiles.load_row_factors(dt, batch, at, left, head, p)
        if gv is not None:
            _, G_v, U_v, T_v = tiles.gates(None, gv, None, batch, at, left, head, column, COLUMNS, p_v)
            y_tile = tiles.times(y_tile, G_v if BACKWARD else U_v, p_v)
            state *= tl.exp(T_v)[None, :]
        state = tiles.add_tokens(tiles.decayed(state, T, p), x_tile, y_tile, exponent, factor, p, PRECISE)
    address, exists = tiles.state_pointers(end, number, row, ROWS, column, COLUMNS, p_ends)
    tl.store(address, state, mask=exists)
