"""The forward: one program for some channels of a sequence, which goes over its chunks with their states in registers.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

A chunk is a scan. Rows past the end of a sequence are read as zeros: dt = 0 leaves the state as it is.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton._in_place import launch_in_place
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from . import problem as tiles
from .problem import Problem, problem_of, spans_of


def state_space_v1(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """y and the final state."""
    x = Operands(*operands)
    p = problem_of(x, config)
    o = jax.ShapeDtypeStruct(x.x.shape, x.x.dtype)
    final = jax.ShapeDtypeStruct((p.B, p.sequences, p.H, p.N), jnp.float32)
    found = _pass_over(x, dict(o=o, final=final), p, config)
    return Outputs(found["o"], found["final"])


def states_before_chunks(x: Operands, p: Problem, config: RecurrenceConfig) -> Array:
    """The states before chunks [b,chunks,h,d], of sequence n from place first // C + n on."""
    states = jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.N), jnp.float32)
    return _pass_over(x, dict(states=states), p, config)["states"]


def _pass_over(x: Operands, types: dict, p: Problem, config: RecurrenceConfig) -> dict[str, Array]:
    """Runs forward_kernel for the results named in `types`."""
    return launch_in_place(
        forward_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, x.initial_state, spans_of(x),
        placed={},
        new=dict(sorted(types.items())),
        zeroed=("o",) if p.packed else (),
        grid=p.B * p.sequences * p.blocks,
        config=config,
        p=p,
        **{name: None for name in ("final", "o", "states") if name not in types},
    )  # fmt: skip


@triton.jit
def forward_kernel(x, A, B, C, dt, D, start, spans, final, o, states, p: tl.constexpr):
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    A_tile = tiles.load_state(A, 0 if p.A_ALL else batch, channel, p)
    state = tiles.load_state(start, batch * p.sequences + n, channel, p)
    skip = tiles.load_skip(D, batch, channel, p)
    place = batch * p.chunks + begin // p.C + n
    for token in tl.range(begin, after, p.C):
        if states is not None:
            tiles.store_state(states, state, place + (token - begin) // p.C, channel, p)
        x_tile = tiles.load_of_channels(x, batch, token, token, after, channel, p)
        dt_tile = tiles.load_of_channels(dt, batch, token, token, after, channel, p)
        B_tile = tiles.load_of_state(B, batch, token, token, after, p)
        h = tiles.scanned(state, tiles.decays_of(dt_tile, A_tile), tiles.outer(dt_tile * x_tile, B_tile))
        if o is not None:
            C_tile = tiles.load_of_state(C, batch, token, token, after, p)
            y = tl.sum(h * C_tile[:, None, :], 2) + skip[None, :] * x_tile
            tiles.store_of_channels(o, y, batch, token, after, channel, p)
        state = tiles.row_of(h, p.C - 1, p)
    if final is not None:
        tiles.store_state(final, state, batch * p.sequences + n, channel, p)
