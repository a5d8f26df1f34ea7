"""The backward: one program for some channels of a sequence, from its last chunk to its first.

With a_t = exp(dt_t · A), states of a chunk recomputed from the one before it, and λ_T the cotangent of the last state,

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
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import problem as tiles
from .forward import states_before_chunks
from .problem import problem_of, spans_of


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
    x, p = primals, problem_of(primals, config)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    of_token, of_sequence = array(p.blocks, p.B, p.S, p.N), array(p.B, p.sequences, p.H, p.N)
    found = launch_in_place(
        backward_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, states_before_chunks(x, p, config), cotangents.o,
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
        p=p,
    )  # fmt: skip
    # Of programs and sequences.
    parts = dict(A=1, B=0, C=0, D=1)
    sums = {name: a.sum(parts[name]) if name in parts else a for name, a in found.items()}
    return tuple(as_operand(sums[name], getattr(x, name)) for name in wrt)


@triton.jit
def backward_kernel(
    x, A, B, C, dt, D, states, dy, of_final, spans,
    dx, dA, dB, dC, ddt, dD, of_start,
    p: tl.constexpr,
):  # fmt: skip
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    number = batch * p.sequences + n
    A_tile = tiles.load_state(A, 0 if p.A_ALL else batch, channel, p)
    skip = tiles.load_skip(D, batch, channel, p)
    of_state = tiles.load_state(of_final, number, channel, p)  # λ of the token after a chunk
    dA_tile = tl.zeros_like(A_tile)
    dD_tile = tl.zeros_like(skip)
    count = (after - begin + p.C - 1) // p.C
    place = batch * p.chunks + begin // p.C + n
    part = tl.program_id(0).to(tl.int64) % p.blocks * p.B + batch
    for i in tl.range(0, count):
        chunk = count - 1 - i
        token = begin + chunk * p.C
        state = tiles.load_state(states, place + chunk, channel, p)
        before = tiles.states_before(state, x, dt, B, A_tile, batch, token, after, channel, p)
        x_tile = tiles.load_of_channels(x, batch, token, token, after, channel, p)
        dt_tile = tiles.load_of_channels(dt, batch, token, token, after, channel, p)
        B_tile = tiles.load_of_state(B, batch, token, token, after, p)
        kept = tiles.decays_of(dt_tile, A_tile) * before
        dy_tile = tl.zeros_like(x_tile)
        if dy is not None:
            dy_tile += tiles.load_of_channels(dy, batch, token, token, after, channel, p)
        h = kept + tiles.outer(dt_tile * x_tile, B_tile)
        tiles.store_of_state(dC, tl.sum(h * dy_tile[:, :, None], 1), part, token, after, p)
        C_tile = tiles.load_of_state(C, batch, token, token, after, p)
        next_dt = tiles.load_of_channels(dt, batch, token + 1, token + 1, after, channel, p)
        of_states = tiles.scanned_back(of_state, tiles.decays_of(next_dt, A_tile), tiles.outer(dy_tile, C_tile))
        of_state = tiles.row_of(of_states, 0, p)
        of_input = tl.sum(of_states * B_tile[:, None, :], 2)
        of_decay = of_states * kept
        tiles.store_of_channels(dx, dt_tile * of_input + skip[None, :] * dy_tile, batch, token, after, channel, p)
        of_dt = tl.sum(of_decay * A_tile[None, :, :], 2) + x_tile * of_input
        tiles.store_of_channels(ddt, of_dt, batch, token, after, channel, p)
        tiles.store_of_state(dB, tl.sum(of_states * (dt_tile * x_tile)[:, :, None], 1), part, token, after, p)
        dA_tile += tl.sum(dt_tile[:, :, None] * of_decay, 0)
        dD_tile += tl.sum(dy_tile * x_tile, 0)
    h = channel + tl.arange(0, p.CHANNELS)
    first = tl.load(dt + (batch * p.S + begin) * p.H + h, mask=(h < p.H) & (begin < after), other=0.0).to(tl.float32)
    tiles.store_state(of_start, tl.exp(first[:, None] * A_tile) * of_state, number, channel, p)
    tiles.store_state(dA, dA_tile, number, channel, p)
    tl.store(dD + number * p.H + h, dD_tile, mask=h < p.H)
