"""The backward of Mamba-2's state space for products of bfloat16: both passes over chunk states, then two kernels.

With the names of the recurrence (q is C, k is B, v is x, g is dt · A), h the initial state of a chunk, dh' the
cotangent of its final state, E_ij = exp(G_i − G_j) for j ≤ i, S_ij = q_i·k_j E_ij and W_ij = do_i·v_j dt_j:

    y_j  = Σ_i S_ij do_i + exp(T − G_j) dh'ᵀ k_j        dv_j = dt_j y_j + skip do_j
    dq_i = Σ_j W_ij E_ij k_j + exp(G_i) h do_i          dk_j = Σ_i W_ij E_ij q_i + exp(T − G_j) dt_j dh' v_j

The decay at row t multiplies all contributions of the rows before t, and of h, to the rows from t on, and to dh'. With
ddt beside the part of g,

    ddt_j = v_j·y_j = Σ_i do_i·v_j S_ij + exp(T − G_j) v_j·dh'ᵀk_j
    dg_t = Σ_{j<t≤i} W_ij S_ij + Σ_{i≥t} exp(G_i) do_i·hᵀq_i + Σ_{j<t} dt_j exp(T − G_j) v_j·dh'ᵀk_j + exp(T) Σ h ∘ dh'

The first sum is a product with a matrix of 0 and 1, whose other factor W ∘ S is in three parts. As a difference of sums
of rows and of columns it would have the rounding errors of all pairs, also where the decay at t is 0.

dA is a sum of dt ∘ dg over all tokens, in which a rounding of states to bfloat16 does not average out, and dt and A are
float32 in models. So the terms with h and dh' are computed where these are float32, in the passes of `states.py`.

`heads_kernel` computes q·k once for all heads that share q and k, and adds up W ∘ E over these; `groups_kernel`
multiplies that sum with k and q, and adds the second terms of dq and dk.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._state_space_v2 import SPEC
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._recurrence import splits, tiles
from ejkernel.kernels._triton._recurrence.problem import (
    Places,
    Problem,
    StateSpace,
    places_of,
    problem_of,
    zero_elsewhere,
)
from ejkernel.primitives._recurrence import Operands
from ejkernel.types.recurrence import RecurrenceConfig

from . import configs
from .gates import Gates, gates_of, load_gates, load_total, token_places
from .outputs import chunk_and_heads, heads_of_program, in_splits, token_products
from .states import both_passes


def cotangents(
    x: Operands, space: StateSpace, do, dfinal_state, names: tuple[str, ...], config: RecurrenceConfig
) -> tuple[jax.Array, ...]:
    """Those of the operands of the recurrence in `names`; that of dt is Σ v ∘ y, without the part of g, and that of
    skip do·v of tokens.
    """
    ends = (x.initial_state, dfinal_state)
    num_splits, x, space = in_splits(x, space)
    do = jnp.zeros_like(x.v) if do is None else splits.split(do, num_splits)
    p = problem_of(x, SPEC, config.chunk_size, of_space=True)
    places = places_of(x, p)
    gates = gates_of(x.g, space.dt, places, p, config)
    states, sums, dinitial_state = both_passes(x, gates, do, ends, names, num_splits, places, p, config)
    found = {"dinitial_state": dinitial_state}
    if names != ("initial_state",):
        found |= _of_heads(x, space.skip, gates, do, states[1], sums, names, places, p, config)
    if {"q", "k"}.intersection(names):
        found |= _of_groups(x, gates, do, (*states, found["dpairs"]), places, p, config)
    of_tokens = lambda a: splits.merged(zero_elsewhere(a, places), num_splits)
    return tuple(found["d" + n] if n == "initial_state" else of_tokens(found["d" + n]) for n in names)


def _of_heads(
    x: Operands, skip, gates: Gates, do, dstates, sums: tuple, names: tuple[str, ...], places: Places, p: Problem,
    config: RecurrenceConfig,
) -> dict[str, jax.Array]:  # fmt: skip
    """dv, W ∘ E added up over the heads of each program, and if they are in `names` ddt and dg, and do·v."""
    heads = heads_of_program(p)
    of_head = jax.ShapeDtypeStruct((p.B, p.H, p.S), jnp.float32)
    types = dict(ddt=of_head, dg=of_head) if "g" in names else {}
    types |= dict(dskip=of_head) if "skip" in names else {}
    types |= dict(
        dpairs=jax.ShapeDtypeStruct((p.B, p.chunks, p.H // heads, p.C, p.C), jnp.float32),
        dv=jax.ShapeDtypeStruct(x.v.shape, x.v.dtype),
    )
    found = _launch.launch(
        heads_kernel,
        *(x.q, x.k, x.v, do, skip, *gates, dstates, *sums),
        *places[:4],
        out_type=dict(sorted(types.items())),
        grid=p.B * p.chunks * (p.H // heads),
        config=config,
        p=p,
        HEADS=heads,
        BLOCKS=sums[0].shape[0] if "g" in names else 0,
        ROWS=min(configs.ROWS, p.D_PAD),
        COLUMNS=min(config.block_v, p.V_PAD),
        **{name: None for name in ("ddt", "dg", "dskip") if name not in types},
    )
    return found | {name: a.swapaxes(1, 2) for name, a in found.items() if name in ("ddt", "dg", "dskip")}


def _of_groups(
    x: Operands, gates: Gates, do, given: tuple, places: Places, p: Problem, config: RecurrenceConfig
) -> dict[str, jax.Array]:
    """dq and dk."""
    rows = min(configs.FEATURES, p.D_PAD)
    return _launch.launch(
        groups_kernel,
        *(x.q, x.k, x.v, do, *gates, *given),
        *places[:4],
        out_type=dict(dk=jax.ShapeDtypeStruct(x.k.shape, x.k.dtype), dq=jax.ShapeDtypeStruct(x.q.shape, x.q.dtype)),
        grid=p.B * p.chunks * p.HK * triton.cdiv(p.D, rows),
        config=config,
        p=p,
        PARTS=p.per_key // heads_of_program(p),
        ROWS=rows,
        COLUMNS=min(config.block_v, p.V_PAD),
    )


@triton.jit
def heads_kernel(
    q, k, v, do, skip, G, U, dt, dstates, from_start, to_end, through, first, length, chunk, owner,
    ddt, dg, dpairs, dskip, dv,
    p: tl.constexpr, HEADS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = p.V
    batch, number, first_head = chunk_and_heads(p, HEADS)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    group = first_head // p.per_key
    # Of pairs the rows are those of j, so that weights are in registers as the product with do takes them.
    k_tile, products = token_products(k, q, batch, at, left, group, ROWS, p)
    rows, of_pairs = tl.arange(0, p.C), tl.full([p.C, p.C], 0.0, tl.float32)
    for head in tl.range(first_head, first_head + HEADS):
        of_state = (batch * p.chunks + number) * p.H + head
        G_tile, U_tile, dt_tile = load_gates(G, U, dt, batch, at, left, head, p)
        later = rows[:, None] <= rows[None, :]
        decays = tl.where(later, tl.exp(tl.where(later, G_tile[None, :] - G_tile[:, None], 0.0)), 0.0)
        do_tile, v_tile = load_values(do, v, batch, at, left, head, 0, COLUMNS, p)
        W = tl.dot(v_tile, tl.trans(do_tile))
        for column in tl.range(COLUMNS, V, COLUMNS, num_stages=1):
            more_do, more_v = load_values(do, v, batch, at, left, head, column, COLUMNS, p)
            W = tl.dot(more_v, tl.trans(more_do), W)
        if dskip is not None:
            here, exists = token_places(batch, at, left, head, p)
            tl.store(dskip + here, tl.sum(tl.where(rows[:, None] == rows[None, :], W, 0.0), 1), mask=exists)
        W *= decays
        of_pairs += W * dt_tile[:, None]
        weights = products * decays
        if dg is not None:
            store_decay_gradients(
                ddt, dg, W * products, G, G_tile, U_tile, dt_tile, from_start, to_end, through, batch, at, left, head,
                of_state, BLOCKS, p,
            )  # fmt: skip
        weights = weights.to(p.dtype)
        y = value_sums(weights, k_tile, k, dstates, U_tile, do_tile, batch, at, left, group, of_state, 0, ROWS, p)
        store_values(dv, y, dt_tile, skip, do_tile, batch, at, left, head, 0, p)
        for column in tl.range(COLUMNS, V, COLUMNS, num_stages=1):
            more_do, _ = load_values(do, v, batch, at, left, head, column, COLUMNS, p)
            y = value_sums(
                weights, k_tile, k, dstates, U_tile, more_do, batch, at, left, group, of_state, column, ROWS, p
            )
            store_values(dv, y, dt_tile, skip, more_do, batch, at, left, head, column, p)
    address = dpairs + tl.cast(tl.program_id(0), tl.int64) * (p.C * p.C) + rows[:, None] * p.C + rows[None, :]
    tl.store(address, of_pairs)


@triton.jit
def load_values(do, v, batch, at, left, head, column, COLUMNS: tl.constexpr, p: tl.constexpr):
    """Tiles of the cotangent of y and of v."""
    do_tile = tiles.load_tile(do, batch, at, left, head, p.H, column, p.V, COLUMNS, p)
    return do_tile.to(p.dtype), tiles.load_tile(v, batch, at, left, head, p.H, column, p.V, COLUMNS, p).to(p.dtype)


@triton.jit
def value_sums(weights, k_tile, k, dstates, U, do, batch, at, left, group, of_state, column, ROWS: tl.constexpr,
               p: tl.constexpr):  # fmt: skip
    """y_j for a block of columns."""
    D: tl.constexpr = p.D
    COLUMNS: tl.constexpr = do.shape[1]
    y = tl.dot(k_tile, tiles.load_state(dstates, of_state, 0, ROWS, column, COLUMNS, p))
    for row in tl.static_range(ROWS, D, ROWS):
        k_row = tiles.load_tile(k, batch, at, left, group, p.HK, row, D, ROWS, p)
        y = tl.dot(k_row, tiles.load_state(dstates, of_state, row, ROWS, column, COLUMNS, p), y)
    return tl.dot(weights, do, tiles.times(y, U, p))


@triton.jit
def store_values(dv, y, dt, skip, do, batch, at, left, head, column, p: tl.constexpr):
    """Stores dv for a block of columns."""
    COLUMNS: tl.constexpr = do.shape[1]
    dv_tile = y * dt[:, None]
    if skip is not None:
        dv_tile += tl.load(skip + batch * p.H + head).to(tl.float32) * do.to(tl.float32)
    tiles.store_tile(dv, dv_tile, batch, at, left, head, p.H, column, p.V, COLUMNS, p)


@triton.jit
def store_decay_gradients(
    ddt, dg, W, G, G_tile, U, dt, from_start, to_end, through, batch, at, left, head, of_state, BLOCKS: tl.constexpr,
    p: tl.constexpr,
):  # fmt: skip
    """Stores ddt and dg of a chunk, from do_i·v_j S_ij in row j and column i, and the sums over blocks of states."""
    here, exists = token_places(batch, at, left, head, p)
    rows, a, b = tl.arange(0, p.C), tl.full([p.C], 0.0, tl.float32), tl.full([p.C], 0.0, tl.float32)
    of_both = 0.0
    for block in tl.static_range(BLOCKS):
        a += tl.load(from_start + here + block * (p.B * p.S * p.H), mask=exists, other=0.0)
        b += tl.load(to_end + here + block * (p.B * p.S * p.H), mask=exists, other=0.0)
        of_both += tl.load(through + block * (p.B * p.chunks * p.H) + of_state)
    b *= tl.exp(U)
    tl.store(ddt + here, tl.sum(W, 1) + b, mask=exists)
    # Column t sums over i ≥ t what passes t from j < t to i, and then to the end of the chunk.
    zeros, since = tl.full([p.C, p.C], 0.0, tl.float32), (rows[:, None] >= rows[None, :]).to(p.dtype)
    passing = tiles.add_product(zeros, W * dt[:, None], since, p, 3) + (b * dt)[:, None]
    passing = tl.sum(tl.where(rows[:, None] < rows[None, :], passing, 0.0), 0)
    from_start = tl.cumsum(a * tl.exp(G_tile), 0, reverse=True)
    through_both = of_both * tl.exp(load_total(G, batch, at, left, head, p))
    tl.store(dg + here, passing + from_start + through_both, mask=exists)


@triton.jit
def groups_kernel(
    q, k, v, do, G, U, dt, states, dstates, dpairs, first, length, chunk, owner,
    dk, dq,
    p: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (p.D + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    row, group = pid % blocks * ROWS, pid // blocks % p.HK
    number, batch = pid // (blocks * p.HK) % p.chunks, pid // (blocks * p.HK * p.chunks)
    at, left = tiles.chunk_at(batch, number, first, length, chunk, owner, p)
    rows, of_pairs = tl.arange(0, p.C), tl.full([p.C, p.C], 0.0, tl.float32)
    of_part = ((batch * p.chunks + number) * p.HK + group) * PARTS
    for part in tl.range(0, PARTS):
        address = dpairs + tl.cast(of_part + part, tl.int64) * (p.C * p.C) + rows[:, None] * p.C + rows[None, :]
        of_pairs += tl.load(address)
    weights = of_pairs.to(p.dtype)  # row j, column i
    k_tile = tiles.load_tile(k, batch, at, left, group, p.HK, row, p.D, ROWS, p)
    q_tile = tiles.load_tile(q, batch, at, left, group, p.HQ, row, p.D, ROWS, p)
    # Transposed, so that what is computed before a product is its second factor, which is in shared memory.
    dq_tile, dk_tile = tl.dot(tl.trans(k_tile), weights), tl.dot(tl.trans(q_tile), tl.trans(weights))
    for head in tl.range(group * p.per_key, group * p.per_key + p.per_key):
        of_state = (batch * p.chunks + number) * p.H + head
        G_tile, U_tile, dt_tile = load_gates(G, U, dt, batch, at, left, head, p)
        for column in tl.range(0, p.V, COLUMNS):
            do_tile, v_tile = load_values(do, v, batch, at, left, head, column, COLUMNS, p)
            state = tiles.load_state(states, of_state, row, ROWS, column, COLUMNS, p)
            dstate = tiles.load_state(dstates, of_state, row, ROWS, column, COLUMNS, p)
            scaled_v = (tiles.times(v_tile, U_tile, p) * dt_tile[:, None]).to(p.dtype)
            dq_tile = tl.dot(state, tl.trans(tiles.times(do_tile, G_tile, p).to(p.dtype)), dq_tile)
            dk_tile = tl.dot(dstate, tl.trans(scaled_v), dk_tile)
    tiles.store_tile(dq, tl.trans(dq_tile), batch, at, left, group, p.HQ, row, p.D, ROWS, p)
    tiles.store_tile(dk, tl.trans(dk_tile), batch, at, left, group, p.HK, row, p.D, ROWS, p)
