"""The forward: one program for some channels of a sequence, with their states in registers, token after token.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

Rows past the end of a sequence are read as zeros: dt = 0 leaves the state as it is.
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
from .problem import problem_of, spans_of


def state_space_v1(
    *operands: Array | None, spec: StateSpaceSpec = StateSpaceSpec(), config: RecurrenceConfig = RecurrenceConfig()
) -> Outputs:
    """y and the final state."""
    x = Operands(*operands)
    parts = splits.number_of(problem_of(x, config))
    if parts == 1:
        found = _pass_over(x, ("final", "o"), config)
        return Outputs(found["o"], found["final"])
    x, final = with_initial_states(x, parts, config)
    return Outputs(merged(_pass_over(x, ("o",), config)["o"], parts), final)


def with_initial_states(x: Operands, parts: int, config: RecurrenceConfig) -> tuple[Operands, Array]:
    """The operands of the parts of sequences, with their initial states, and the final state of the sequences."""
    start, x = x.initial_state, splits.parts_of(x, parts)
    ends = _pass_over(x, ("final",), config)["final"]
    states, final = splits.entering(ends, start, x, parts)
    return x._replace(initial_state=states), final


def states_before_chunks(x: Operands, config: RecurrenceConfig) -> Array:
    """The states before chunks [b,chunks,h,d], of sequence n from place first // C + n on."""
    return _pass_over(x, ("states",), config)["states"]


def _pass_over(x: Operands, wanted: tuple[str, ...], config: RecurrenceConfig) -> dict[str, Array]:
    """Runs forward_kernel for the results that are wanted. A final state is in the place of the initial one."""
    p = problem_of(x, config)
    start, placed = x.initial_state, {}
    if "final" in wanted:
        zeros = jnp.zeros((p.B, p.sequences, p.H, p.N), jnp.float32)
        start, placed = None, dict(final=zeros if start is None else start)
    states = jax.ShapeDtypeStruct((p.B, p.chunks, p.H, p.N), jnp.float32)
    types = dict(o=jax.ShapeDtypeStruct(x.x.shape, x.x.dtype), states=states)
    return launch_in_place(
        forward_kernel, x.x, x.A, x.B, x.C, x.dt, x.D, start, spans_of(x),
        placed=placed,
        new={name: type_ for name, type_ in types.items() if name in wanted},
        zeroed=("o",) if p.packed else (),
        grid=p.B * p.sequences * p.blocks,
        config=config,
        p=p, AT_ONCE=p.at_once(8),
        **{name: None for name in ("final", "o", "states") if name not in wanted},
    )  # fmt: skip


@triton.jit
def forward_kernel(
    x, A, B, C, dt, D, start, spans,
    final, o, states,
    p: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    channel, batch, n, begin, after = tiles.place_of_program(spans, p)
    number = batch * p.sequences + n
    A_tile = tiles.load_decay_rates(A, batch, channel, p)
    state = tiles.load_state(start if final is None else final, number, channel, p)
    skip = tiles.load_skip(D, batch, channel, p)
    place = batch * p.chunks + begin // p.C + n
    for first in tl.range(begin, after, AT_ONCE):
        if states is not None and (first - begin) % p.C == 0:
            tiles.store_state(states, state, place + (first - begin) // p.C, channel, p)
        rows = ()
        for i in tl.static_range(AT_ONCE):
            x_row = tiles.load_of_channels(x, batch, first + i, after, channel, p)
            dt_row = tiles.load_of_channels(dt, batch, first + i, after, channel, p)
            B_row = tiles.load_of_state(B, batch, first + i, after, p)
            C_row = tiles.load_of_state(C, batch, first + i, after, p) if o is not None else B_row
            rows += ((x_row, dt_row, B_row, C_row),)
        for i in tl.static_range(AT_ONCE):
            x_row, dt_row, B_row, C_row = rows[i]
            state = tiles.decays_of(dt_row, A_tile, p) * state + tiles.outer(dt_row * x_row, B_row)
            if o is not None:
                y = tl.sum(state * C_row[None, :], 1) + skip * x_row
                tiles.store_of_channels(o, y, batch, first + i, after, channel, p)
    if final is not None:
        tiles.store_state(final, state, number, channel, p)
