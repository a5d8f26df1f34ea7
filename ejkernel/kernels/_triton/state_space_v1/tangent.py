"""The tangent: one program for some channels of a sequence, with the states and their tangents in registers.

With a_t = exp(dt_t · A) and primes for tangents,

    h'_t = a_t ∘ h'_{t−1} + (A' dt_t + A dt'_t) ∘ a_t ∘ h_{t−1} + (dt_t x_t)' B_t + dt_t x_t B'_t
    y'_t = C'_t · h_t + C_t · h'_t + D' x_t + D x'_t
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._recurrence.splits import merged
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import problem as tiles
from . import splits
from .forward import with_initial_states
from .problem import LN_2, problem_of, spans_of


def state_space_v1_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: StateSpaceSpec = StateSpaceSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> Outputs:
    """The tangents of y and of the final state; a tangent of None is zero."""
    zeros = lambda a, of: jnp.zeros(of.shape, jnp.float32) if a is None and of is not None else a
    x, dot = primals, Operands(*map(zeros, tangents, primals))
    parts = splits.number_of(problem_of(x, config))
    if parts == 1:
        found = _pass_over(x, dot, ("final", "o"), config)
        return Outputs(found["o"], found["final"])
    x, _ = with_initial_states(x, parts, config)
    start, dot = dot.initial_state, splits.parts_of(dot, parts)
    ends = _pass_over(x, dot, ("final",), config)["final"]
    states, final = splits.entering(ends, start, x, parts)
    return Outputs(merged(_pass_over(x, dot._replace(initial_state=states), ("o",), config)["o"], parts), final)


def _pass_over(x: Operands, dot: Operands, wanted: tuple[str, ...], config: RecurrenceConfig) -> dict[str, Array]:
    """Runs tangent_kernel for the results that are wanted."""
    p = problem_of(x, config)
    final = jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.N), jnp.float32)
    types = dict(o=jax.ShapeDtypeStruct(x.x.shape, x.x.dtype), final=final)
    return launch_in_place(
        tangent_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, x.initial_state, *dot[:7], spans_of(x),
        placed={},
        new={name: type_ for name, type_ in types.items() if name in wanted},
        zeroed=("o",) if p.packed else (),
        grid=p.B * p.sequences * p.blocks,
        config=config,
        p=p, AT_ONCE=p.at_once(8),
        **{name: None for name in ("final", "o") if name not in wanted},
    )  # fmt: skip


@triton.jit
def tangent_kernel(
    x, A, B, C, dt, D, start, x_dot, A_dot, B_dot, C_dot, dt_dot, D_dot, start_dot, spans,
    o, final,
    p: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    number = batch * p.sequences + n
    A_tile = tiles.load_decay_rates(A, batch, channel, p)
    A_dot_tile = tiles.load_state(A_dot, 0 if p.A_ALL else batch, channel, p)
    state, state_dot = tiles.load_state(start, number, channel, p), tiles.load_state(start_dot, number, channel, p)
    skip, skip_dot = tiles.load_skip(D, batch, channel, p), tiles.load_skip(D_dot, batch, channel, p)
    for first in tl.range(begin, after, AT_ONCE):
        rows = ()
        for i in tl.static_range(AT_ONCE):
            x_row = tiles.load_of_channels(x, batch, first + i, after, channel, p)
            x_dot_row = tiles.load_of_channels(x_dot, batch, first + i, after, channel, p)
            dt_row = tiles.load_of_channels(dt, batch, first + i, after, channel, p)
            dt_dot_row = tiles.load_of_channels(dt_dot, batch, first + i, after, channel, p)
            B_row = tiles.load_of_state(B, batch, first + i, after, p)
            B_dot_row = tiles.load_of_state(B_dot, batch, first + i, after, p)
            C_row = tiles.load_of_state(C, batch, first + i, after, p)
            C_dot_row = tiles.load_of_state(C_dot, batch, first + i, after, p)
            rows += ((x_row, x_dot_row, dt_row, dt_dot_row, B_row, B_dot_row, C_row, C_dot_row),)
        for i in tl.static_range(AT_ONCE):
            x_row, x_dot_row, dt_row, dt_dot_row, B_row, B_dot_row, C_row, C_dot_row = rows[i]
            decays = tiles.decays_of(dt_row, A_tile, p)
            decayed = decays * state
            of_decay = A_dot_tile * dt_row[:, None] + A_tile * (dt_dot_row * LN_2)[:, None]
            state_dot = decays * state_dot + of_decay * decayed + tiles.outer(dt_row * x_row, B_dot_row)
            state_dot += tiles.outer(dt_dot_row * x_row + dt_row * x_dot_row, B_row)
            state = decayed + tiles.outer(dt_row * x_row, B_row)
            if o is not None:
                y = tl.sum(C_dot_row[None, :] * state + C_row[None, :] * state_dot, 1)
                y += skip_dot * x_row + skip * x_dot_row
                tiles.store_of_channels(o, y, batch, first + i, after, channel, p)
    if final is not None:
        tiles.store_state(final, state_dot, number, channel, p)
