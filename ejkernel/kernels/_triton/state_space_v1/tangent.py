"""The tangent: one program for some channels of a sequence, with the states and their tangents in registers.

With a_t = exp(dt_t · A) and primes for tangents,

    h'_t = a_t ∘ h'_{t−1} + (A' dt_t + A dt'_t) ∘ a_t ∘ h_{t−1} + (dt_t x_t)' B_t + dt_t x_t B'_t
    y'_t = C'_t · h_t + C_t · h'_t + D' x_t + D x'_t
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import problem as tiles
from .problem import problem_of, spans_of


def state_space_v1_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: StateSpaceSpec = StateSpaceSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> Outputs:
    """The tangents of y and of the final state; a tangent of None is zero."""
    x, dot, p = primals, tangents, problem_of(primals, config)
    zeros = lambda a, of: jnp.zeros(of.shape, jnp.float32) if a is None and of is not None else a
    dots = [zeros(getattr(dot, name), getattr(x, name)) for name in ("x", "A", "B", "C", "dt", "D", "initial_state")]
    found = launch_in_place(
        tangent_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, x.initial_state, *dots, spans_of(x),
        placed={},
        new=dict(
            o=jax.ShapeDtypeStruct(x.x.shape, x.x.dtype),
            final=jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.N), jnp.float32),
        ),
        zeroed=("o",) if p.packed else (),
        grid=p.B * p.sequences * p.blocks,
        config=config,
        p=p,
    )  # fmt: skip
    return Outputs(found["o"], found["final"])


@triton.jit
def tangent_kernel(
    x, A, B, C, dt, D, start, x_dot, A_dot, B_dot, C_dot, dt_dot, D_dot, start_dot, spans,
    o, final,
    p: tl.constexpr,
):  # fmt: skip
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    number = batch * p.sequences + n
    A_tile = tiles.load_state(A, 0 if p.A_ALL else batch, channel, p)
    A_dot_tile = tiles.load_state(A_dot, 0 if p.A_ALL else batch, channel, p)
    state, state_dot = tiles.load_state(start, number, channel, p), tiles.load_state(start_dot, number, channel, p)
    skip, skip_dot = tiles.load_skip(D, batch, channel, p), tiles.load_skip(D_dot, batch, channel, p)
    for token in tl.range(begin, after, p.C):
        before = tiles.states_before(state, x, dt, B, A_tile, batch, token, after, channel, p)
        x_tile = tiles.load_of_channels(x, batch, token, token, after, channel, p)
        x_dot_tile = tiles.load_of_channels(x_dot, batch, token, token, after, channel, p)
        dt_tile = tiles.load_of_channels(dt, batch, token, token, after, channel, p)
        dt_dot_tile = tiles.load_of_channels(dt_dot, batch, token, token, after, channel, p)
        B_tile = tiles.load_of_state(B, batch, token, token, after, p)
        B_dot_tile = tiles.load_of_state(B_dot, batch, token, token, after, p)
        decays = tiles.decays_of(dt_tile, A_tile)
        h = decays * before + tiles.outer(dt_tile * x_tile, B_tile)
        of_decay = A_dot_tile[None, :, :] * dt_tile[:, :, None] + A_tile[None, :, :] * dt_dot_tile[:, :, None]
        added = of_decay * decays * before + tiles.outer(dt_tile * x_tile, B_dot_tile)
        added += tiles.outer(dt_dot_tile * x_tile + dt_tile * x_dot_tile, B_tile)
        h_dot = tiles.scanned(state_dot, decays, added)
        C_tile = tiles.load_of_state(C, batch, token, token, after, p)
        C_dot_tile = tiles.load_of_state(C_dot, batch, token, token, after, p)
        y = tl.sum(C_dot_tile[:, None, :] * h + C_tile[:, None, :] * h_dot, 2)
        y += skip_dot[None, :] * x_tile + skip[None, :] * x_dot_tile
        tiles.store_of_channels(o, y, batch, token, after, channel, p)
        state, state_dot = tiles.row_of(h, p.C - 1, p), tiles.row_of(h_dot, p.C - 1, p)
    tiles.store_state(final, state_dot, number, channel, p)
