"""The forward of Mamba-2's state space for products of bfloat16: the states of chunks, then all chunks in parallel.

With the names of the recurrence (q is C, k is B, v is x) and h the initial state of a chunk,

    y_i = exp(G_i) hᵀq_i + Σ_{j≤i} q_i·k_j exp(G_i − G_j) dt_j v_j + skip v_i

Long sequences of few heads are cut into splits, whose states are computed from zeros. With h₀ the state in which a
split begins and P the sum of its log decays before the chunk, the initial state of a chunk is h + exp(P) h₀: the second
term enters here, where exp(P) is not 0.

`outputs_kernel` computes q·k once for all heads of a program, which share q and k.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._state_space_v2 import SPEC
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import pairs, splits, tiles
from ejkernel.kernels._triton._recurrence.problem import (
    Problem,
    StateSpace,
    places_of,
    problem_of,
    repeated,
    zero_elsewhere,
)
from ejkernel.primitives._recurrence import Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig

from . import configs
from .gates import gates_of, load_gates
from .states import chunk_states

PROGRAMS = 400
"""So many programs of `chunk_states` are enough, before its blocks of states."""
MOST_HEADS = 16
"""The most heads of a group that a program takes one after the other."""


def recurrence(x: Operands, space: StateSpace, config: RecurrenceConfig) -> Outputs:
    """y and the final state."""
    start, entering = x.initial_state, None
    num_splits, x, space = in_splits(x, space)
    p = problem_of(x, SPEC, config.chunk_size, of_space=True)
    places = places_of(x, p)
    gates = gates_of(x.g, space.dt, places, p, config)
    of_split = None if num_splits > 1 else start
    states, final, since = chunk_states(x, gates, of_split, places, p, config, since=num_splits > 1)
    if num_splits > 1:
        how = dict(gates=(x.g, None, None, None), num_splits=num_splits, p=p, backward=False)
        entering, final = splits.entering(final, start=start, **how)
        entering = entering.swapaxes(3, 4).astype(jnp.bfloat16)
    heads = heads_of_program(p)
    o = _launch.launch(
        outputs_kernel,
        *(x.q, x.k, x.v, *gates, space.skip, states, entering, since),
        *places[:4],
        out_type=jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
        grid=p.B * p.chunks * (p.H // heads),
        config=config,
        p=p,
        HEADS=heads,
        ROWS=min(configs.ROWS, p.D_PAD),
        COLUMNS=min(config.block_v, p.V_PAD),
    )
    return Outputs(splits.merged(zero_elsewhere(o, places), num_splits), final)


def in_splits(x: Operands, space: StateSpace) -> tuple[int, Operands, StateSpace]:
    """The number of splits, and the operands with the splits as sequences."""
    num_splits = splits.number_of(x, PROGRAMS)
    if num_splits > 1:
        q, k, v, g, dt = (splits.split(a, num_splits) for a in (*x[:4], space.dt))
        x, space = x._replace(q=q, k=k, v=v, g=g), StateSpace(dt, repeated(space.skip, num_splits))
    return num_splits, x, space


def heads_of_program(p: Problem) -> int:
    """A divisor of the heads that share keys: the largest for which there are enough programs."""
    most = min(MOST_HEADS, max(1, p.B * p.chunks * p.H // splits.PROGRAMS))
    return max(n for n in range(1, most + 1) if p.per_key % n == 0)


@triton.jit
def outputs_kernel(
    q, k, v, G, U, dt, skip, states, entering, since, first, length, chunk, owner,
    o,
    p: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = p.V
    batch, number, first_head = chunk_and_heads(p, HEADS)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    group = first_head // p.per_key
    q_tile, products = token_products(q, k, batch, at, left, group, ROWS, p)
    for head in tl.range(first_head, first_head + HEADS):
        of_state = (batch * p.chunks + number) * p.H + head
        G_tile, _, dt_tile = load_gates(G, U, dt, batch, at, left, head, p)
        weights = (products * pairs.pair_decays(None, G_tile, p) * dt_tile[None, :]).to(p.dtype)
        store_outputs(
            o, weights, q_tile, q, v, G_tile, skip, states, entering, since, of_state, batch, at, left, group, head, 0,
            COLUMNS, p,
        )  # fmt: skip
        for column in tl.range(COLUMNS, V, COLUMNS, num_stages=1):
            store_outputs(
                o, weights, q_tile, q, v, G_tile, skip, states, entering, since, of_state, batch, at, left, group, head,
                column, COLUMNS, p,
            )  # fmt: skip


@triton.jit
def chunk_and_heads(p: tl.constexpr, HEADS: tl.constexpr):
    """The sequence, the number of the chunk and the first of the HEADS heads of this program."""
    parts: tl.constexpr = p.H // HEADS
    pid = tl.program_id(0)
    return pid // (parts * p.chunks), pid // parts % p.chunks, pid % parts * HEADS


@triton.jit
def token_products(a, b, batch, at, left, group, ROWS: tl.constexpr, p: tl.constexpr):
    """The first ROWS features of the tokens of a chunk in a, and a_i·b_j for all pairs of them; a and b are q or k."""
    D: tl.constexpr = p.D
    a_tile = tiles.load_tile(a, batch, at, left, group, p.HK, 0, D, ROWS, p)
    products = tl.dot(a_tile, tl.trans(tiles.load_tile(b, batch, at, left, group, p.HK, 0, D, ROWS, p)))
    for row in tl.static_range(ROWS, D, ROWS):
        a_row = tiles.load_tile(a, batch, at, left, group, p.HK, row, D, ROWS, p)
        products = tl.dot(a_row, tl.trans(tiles.load_tile(b, batch, at, left, group, p.HK, row, D, ROWS, p)), products)
    return a_tile, products


@triton.jit
def store_outputs(
    o, weights, q_tile, q, v, G, skip, states, entering, since, of_state, batch, at, left, group, head, column,
    COLUMNS: tl.constexpr, p: tl.constexpr,
):  # fmt: skip
    """Stores y for a block of columns."""
    y = from_state(q_tile, q, states, of_state, batch, at, left, group, column, COLUMNS, p)
    if since is not None:
        decay = tl.exp(tl.load(since + of_state))
        if decay != 0:
            number = batch * p.H + head
            y += decay * from_state(q_tile, q, entering, number, batch, at, left, group, column, COLUMNS, p)
    y = tiles.times(y, G, p)
    v_tile = tiles.load_tile(v, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)
    if skip is not None:
        y += tl.load(skip + batch * p.H + head).to(tl.float32) * v_tile.to(tl.float32)
    tiles.store_tile(o, tl.dot(weights, v_tile, y), batch, at, left, head, p.H, column, p.V, COLUMNS, p)


@triton.jit
def from_state(q_tile, q, states, number, batch, at, left, group, column, COLUMNS: tl.constexpr, p: tl.constexpr):
    """hᵀq_i for a block of columns, with h the state `number` of an array; q_tile has the first features of q."""
    D: tl.constexpr = p.D
    ROWS: tl.constexpr = q_tile.shape[1]
    y = tl.dot(q_tile, tiles.load_state(states, number, 0, ROWS, column, COLUMNS, p))
    for row in tl.static_range(ROWS, D, ROWS):
        q_row = tiles.load_tile(q, batch, at, left, group, p.HQ, row, D, ROWS, p)
        y = tl.dot(q_row, tiles.load_state(states, number, row, ROWS, column, COLUMNS, p), y)
    return y
