"""The forward token by token, for decoding: each program keeps a block of columns of a head's state in registers.

    u = β (v − exp(g) hᵀ k),    h' = exp(g) h + k uᵀ,    o = scale (exp(g) hᵀ q + (k·q) u)

A state is read once and written once, in its place: a step takes as long as its memory.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._recurrence import tiles
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig

from . import chunks


def gated_delta_rule(x: Operands, spec: GatedDeltaRuleSpec, config: RecurrenceConfig) -> Outputs:
    """o and the final state of a dense call."""
    p = chunks.problem(x, spec, config)
    columns = min(config.block_v, p.V_PAD)
    start = jnp.zeros((p.B, 1, p.H, p.D, p.V), jnp.float32) if x.initial_state is None else x.initial_state
    found = launch_in_place(
        step_kernel, x.q, x.k, x.v, x.beta, x.g,
        placed=dict(states=start),
        new=dict(o=jax.ShapeDtypeStruct(x.v.shape, x.v.dtype)),
        grid=p.B * p.H * triton.cdiv(p.V, columns),
        config=config,
        p=p, COLUMNS=columns, NORMALISED=spec.use_qk_l2norm,
    )  # fmt: skip
    return Outputs(found["o"], found["states"])


@triton.jit
def step_kernel(q, k, v, beta, g, states, o, p: tl.constexpr, COLUMNS: tl.constexpr, NORMALISED: tl.constexpr):
    column, number = block_of_program(COLUMNS, p)
    address, exists = tiles.state_pointers(states, number, 0, p.D_PAD, column, COLUMNS, p)
    state = tl.load(address, mask=exists, other=0.0)
    for i in range(p.S):
        token = tl.cast(number // p.H, tl.int64) * p.S + i
        state = after_token(state, q, k, v, beta, g, o, token, number % p.H, column, COLUMNS, NORMALISED, p)
    tl.store(address, state, mask=exists)


@triton.jit
def block_of_program(COLUMNS: tl.constexpr, p: tl.constexpr):
    """First column of a program, and the number of its state: that of the sequence times the heads, plus the head."""
    blocks: tl.constexpr = (p.V + COLUMNS - 1) // COLUMNS
    return tl.program_id(0) % blocks * COLUMNS, tl.program_id(0) // blocks


@triton.jit
def after_token(
    state, q, k, v, beta, g, o, token, head, column, COLUMNS: tl.constexpr, NORMALISED: tl.constexpr, p: tl.constexpr
):  # fmt: skip
    """The state after a token, whose o is stored."""
    k_row = row_of_token(k, token, head // p.per_key, p.HK, NORMALISED, p)
    q_row = row_of_token(q, token, head // p.per_query, p.HQ, NORMALISED, p) * p.scale
    if g is not None:
        state *= chunks.exp(tiles.finite(tl.load(g + token * p.H + head).to(tl.float32)), p)
    e = column + tl.arange(0, COLUMNS)
    of_token = (token * p.H + head) * p.V + e
    v_row = tl.load(v + of_token, mask=e < p.V, other=0.0).to(tl.float32)
    retrieved, read = tl.sum(k_row[:, None] * state, 0), tl.sum(q_row[:, None] * state, 0)
    u = tl.load(beta + token * p.H + head).to(tl.float32) * (v_row - retrieved)
    tl.store(o + of_token, (read + tl.sum(q_row * k_row, 0) * u).to(o.dtype.element_ty), mask=e < p.V)
    return state + k_row[:, None] * u[None, :]


@triton.jit
def row_of_token(x, token, head, HEADS: tl.constexpr, NORMALISED: tl.constexpr, p: tl.constexpr):
    """The row [D] of a token in an array [t,heads,D] in float32, divided by its norm if it is normalised."""
    d = tl.arange(0, p.D_PAD)
    row = tl.load(x + (token * HEADS + head) * p.D + d, mask=d < p.D, other=0.0).to(tl.float32)
    if NORMALISED:
        row *= tl.rsqrt(tl.sum(row * row, 0) + chunks.NORM_EPSILON)
    return row
