"""The backward: one program for some channels of a sequence, from its last tokens to its first.

A few at a time, whose states are computed again from the one before their chunk. With a_t = exp(dt_t · A), and the
cotangent of the last state in the place of a_{T+1} ∘ λ_{T+1},

    λ_t = dy_t · C_t + a_{t+1} ∘ λ_{t+1},    e_t = λ_t ∘ a_t ∘ h_{t−1}
    dx_t = dt_t · λ_t B_t + D · dy_t,    dB_t = λ_t (dt_t · x_t),    dC_t = h_t dy_t,    dD = Σ_t dy_t · x_t
    ddt_t = Σ_d e_t ∘ A + x_t · λ_t B_t,    dA = Σ_t dt_t · e_t,    dh_0 = a_1 ∘ λ_1

dB and dC are sums over channels: each program stores its part, which XLA adds up, so that gradients repeat bit for bit.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._state_space_v1 import as_operand
from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.kernels._triton._recurrence.splits import merged, split
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import problem as tiles
from . import splits
from .forward import states_before_chunks, with_initial_states
from .problem import LN_2, problem_of, spans_of


def state_space_v1_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: StateSpaceSpec = StateSpaceSpec(),
    config: RecurrenceConfig = RecurrenceConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    parts = splits.number_of(problem_of(primals, config))
    found = _of_whole(primals, cotangents, config) if parts == 1 else _of_parts(primals, cotangents, parts, config)
    return tuple(as_operand(found[name], getattr(primals, name)) for name in wrt)


def _of_parts(x: Operands, cotangents: Outputs, parts: int, config: RecurrenceConfig) -> dict[str, Array]:
    """The cotangents of all operands, by those of the parts of sequences."""
    x, _ = with_initial_states(x, parts, config)
    dy = split(cotangents.o, parts)
    ends = jnp.zeros_like(x.initial_state) if dy is None else _of_initial_states(x, dy, config)
    of_final, of_start = splits.entering(ends, cotangents.final_state, x, parts, backward=True)
    found = _of_whole(x, Outputs(dy, of_final), config)
    found |= {name: merged(found[name], parts) for name in ("x", "B", "C", "dt")}
    found |= {name: found[name].reshape(-1, parts, *found[name].shape[1:]).sum(1) for name in ("A", "D")}
    return found | dict(initial_state=of_start)


def _of_initial_states(x: Operands, dy: Array, config: RecurrenceConfig) -> Array:
    """The cotangents of initial states where those of final states are 0."""
    p = problem_of(x, config)
    return launch_in_place(
        cotangent_kernel, x.A, x.C, x.dt, dy,
        placed={},
        new=dict(of_start=jax.ShapeDtypeStruct(x.initial_state.shape, jnp.float32)),
        grid=p.B * p.blocks,
        config=config,
        p=p, AT_ONCE=p.at_once(8),
    )["of_start"]  # fmt: skip


def _of_whole(x: Operands, cotangents: Outputs, config: RecurrenceConfig) -> dict[str, Array]:
    """The cotangents of all operands, those of A and D for each batch element."""
    p = problem_of(x, config)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    of_token, of_sequence = array(p.blocks, p.B, p.S, p.N), array(p.B, p.sequences, p.H, p.N)
    found = launch_in_place(
        backward_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, states_before_chunks(x, config), cotangents.o,
        cotangents.final_state, spans_of(x),
        placed={},
        new=dict(
            x=jax.ShapeDtypeStruct(x.x.shape, x.x.dtype), A=of_sequence, B=of_token, C=of_token,
            dt=jax.ShapeDtypeStruct(x.dt.shape, x.dt.dtype), D=array(p.B, p.sequences, p.H), initial_state=of_sequence,
        ),
        # Tokens of no sequence have a gradient of 0.
        zeroed=("x", "B", "C", "dt") if p.packed else (),
        grid=p.B * p.sequences * p.blocks,
        config=config,
        p=p, AT_ONCE=p.at_once(4),
    )  # fmt: skip
    # Of programs and sequences.
    parts = dict(A=1, B=0, C=0, D=1)
    return {name: a.sum(parts[name]) if name in parts else a for name, a in found.items()}


@triton.jit
def cotangent_kernel(A, C, dt, dy, of_start, p: tl.constexpr, AT_ONCE: tl.constexpr):
    channel, batch, _, begin, after = tiles.place_of_program(None, p)
    A_tile = tiles.load_decay_rates(A, batch, channel, p)
    of_state = tl.zeros_like(A_tile)  # a_{t+1} ∘ λ_{t+1}, of the token after
    count = (after - begin + AT_ONCE - 1) // AT_ONCE
    for i in tl.range(0, count):
        token = begin + (count - 1 - i) * AT_ONCE
        rows = ()
        for j in tl.static_range(AT_ONCE):
            dt_row = tiles.load_of_channels(dt, batch, token + j, after, channel, p)
            dy_row = tiles.load_of_channels(dy, batch, token + j, after, channel, p)
            rows += ((dt_row, dy_row, tiles.load_of_state(C, batch, token + j, after, p)),)
        for j in tl.static_range(AT_ONCE - 1, -1, -1):
            dt_row, dy_row, C_row = rows[j]
            of_state = tiles.decays_of(dt_row, A_tile, p) * (of_state + tiles.outer(dy_row, C_row))
    tiles.store_state(of_start, of_state, batch, channel, p)


@triton.jit
def backward_kernel(
    x, A, B, C, dt, D, states, dy, of_final, spans,
    dx, dA, dB, dC, ddt, dD, of_start,
    p: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    number = batch * p.sequences + n
    A_tile = tiles.load_decay_rates(A, batch, channel, p)
    skip = tiles.load_skip(D, batch, channel, p)
    of_state = tiles.load_state(of_final, number, channel, p)  # a_{t+1} ∘ λ_{t+1}, of the token after
    dA_tile = tl.zeros_like(A_tile)
    dD_tile = tl.zeros_like(skip)
    count = (after - begin + AT_ONCE - 1) // AT_ONCE
    place = batch * p.chunks + begin // p.C + n
    part = tl.program_id(0).to(tl.int64) % p.blocks * p.B + batch
    for i in tl.range(0, count):
        token = begin + (count - 1 - i) * AT_ONCE
        chunk = (token - begin) // p.C
        state = tiles.load_state(states, place + chunk, channel, p)
        for first in tl.range(begin + chunk * p.C, token, AT_ONCE):
            state, _ = tiles.advanced(state, x, dt, B, A_tile, batch, first, after, channel, AT_ONCE, p)
        _, kept = tiles.advanced(state, x, dt, B, A_tile, batch, token, after, channel, AT_ONCE, p)
        rows = ()
        for j in tl.static_range(AT_ONCE - 1, -1, -1):
            x_row = tiles.load_of_channels(x, batch, token + j, after, channel, p)
            dt_row = tiles.load_of_channels(dt, batch, token + j, after, channel, p)
            B_row = tiles.load_of_state(B, batch, token + j, after, p)
            C_row = tiles.load_of_state(C, batch, token + j, after, p)
            dy_row = tl.zeros_like(x_row)
            if dy is not None:
                dy_row += tiles.load_of_channels(dy, batch, token + j, after, channel, p)
            u_row = dt_row * x_row
            of_C = tl.sum((kept[j] + tiles.outer(u_row, B_row)) * dy_row[:, None], 0)
            of_state += tiles.outer(dy_row, C_row)
            of_B = tl.sum(of_state * u_row[:, None], 0)
            of_u = tl.sum(of_state * B_row[None, :], 1)
            of_decay = of_state * kept[j]
            of_dt = tl.sum(of_decay * A_tile, 1) * LN_2 + x_row * of_u
            rows += ((dt_row * of_u + skip * dy_row, of_dt, of_B, of_C),)
            dA_tile += dt_row[:, None] * of_decay
            dD_tile += dy_row * x_row
            of_state *= tiles.decays_of(dt_row, A_tile, p)
        for j in tl.static_range(AT_ONCE):
            of_x, of_dt, of_B, of_C = rows[AT_ONCE - 1 - j]
            tiles.store_of_channels(dx, of_x, batch, token + j, after, channel, p)
            tiles.store_of_channels(ddt, of_dt, batch, token + j, after, channel, p)
            tiles.store_of_state(dB, of_B, part, token + j, after, p)
            tiles.store_of_state(dC, of_C, part, token + j, after, p)
    h = channel + tl.arange(0, p.CHANNELS)
    tiles.store_state(of_start, of_state, number, channel, p)
    tiles.store_state(dA, dA_tile, number, channel, p)
    tl.store(dD + number * p.H + h, dD_tile, mask=h < p.H)
