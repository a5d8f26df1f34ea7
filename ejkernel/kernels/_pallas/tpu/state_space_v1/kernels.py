"""The kernels of Mamba's state space on TPU: a loop over the chunks of some channels, with the state in vector memory.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

Channels are lanes, and the numbers of a state are sublanes: rows of x and dt are spread over sublanes, and columns of B
and C over lanes. The backward reads the state before each chunk, which the forward has written, recomputes those before
groups of tokens, and goes back over them. JAX differentiates `tokens_of_group`, so that the kernels of tangent and
backward need no equations of their own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas.tpu._recurrence.layout import first_and_last, order_of, ordered
from ejkernel.kernels._state_space_v1 import as_operand
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig

from .layout import (
    GROUP,
    Arrays,
    Plan,
    Specs,
    arrays_of,
    final_states,
    first_states,
    in_sequence,
    launch,
    plan_of,
    tokens_type,
)

# --- A group of tokens ------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Rows of x and dt [1,lanes], and columns of B and C [d,1], of the tokens of a group."""

    x: Any
    dt: Any
    B: Any
    C: Any


def tokens_of_group(A: Array, D: Array, h: Array, group: Group) -> tuple[Array, tuple[Array, ...]]:
    """The state [d,lanes] after a group, and the rows of y, from A [d,lanes] and D [1,lanes]."""
    rows = []
    for x, dt, B, C in zip(*group, strict=True):
        h = jnp.exp(dt * A) * h + (dt * x) * B
        rows.append((h * C).sum(0, keepdims=True) + D * x)
    return h, tuple(rows)


def _read(arrays: Arrays, n: Any) -> Group:
    """Group n of a chunk, in float32."""
    x, dt = (a[_rows(n), :].astype(jnp.float32) for a in (arrays.x, arrays.dt))
    B, C = arrays.B[n], arrays.C[n]
    rows, columns = lambda a: jnp.split(a, GROUP), lambda a: jnp.split(a, GROUP, 1)
    return Group(*map(tuple, (rows(x), rows(dt), columns(B), columns(C))))


def _rows(n: Any) -> Any:
    return pl.ds(pl.multiple_of(n * GROUP, GROUP), GROUP)


def _of_rows(rows: tuple[Array, ...]) -> Array:
    return jnp.concatenate(rows, 0)


def _of_columns(columns: tuple[Array, ...]) -> Array:
    """[d,GROUP] from columns [d,1], each of which a mask puts in its lane."""
    place = lax.broadcasted_iota(jnp.int32, (columns[0].shape[0], GROUP), 1)
    return sum(jnp.where(place == t, column, 0.0) for t, column in enumerate(columns))


# --- Forward ----------------------------------------------------------------------------------------------------------


def state_space_v1(*operands: Array | None, spec: StateSpaceSpec, config: RecurrenceConfig) -> Outputs:
    """y and the final state."""
    x = Operands(*operands)
    plan = plan_of(x, config)
    order, first = order_of(x, plan), first_states(x.initial_state, plan)
    o, last, _ = _forward(arrays_of(x, order, plan), first, order, plan, keep=False)
    return Outputs(in_sequence(o, order, plan), final_states(last, first, order))


def _forward(arrays: Arrays, first: Array, order: Any, plan: Plan, keep: bool) -> tuple[Array, Array, Array | None]:
    """y, the final state, and with `keep` the state before each chunk."""
    specs = Specs(plan)
    states = jax.ShapeDtypeStruct((plan.b, plan.count, plan.d, plan.h), jnp.float32)
    return launch(
        _forward_kernel, "state_space_v1_forward", plan, order.table, (arrays, first),
        [specs.of_arrays(arrays), specs.of_sequence(plan.d)],
        [
            (specs.of_tokens(), tokens_type(plan, arrays.x.dtype)),
            (specs.of_sequence(plan.d), plan.state),
            (specs.of_states(), states) if keep else (None, None),
        ],
        [(plan.d,)],
    )  # fmt: skip


def _forward_kernel(plan, table, arrays, first, o, last, states, state):
    is_first, is_last = first_and_last(plan, table)

    @pl.when(is_first)
    def _():
        state[...] = first[...]

    if states is not None:
        states[...] = state[...]

    def step(n, h):
        h, y = tokens_of_group(arrays.A[...], arrays.D[...], h, _read(arrays, n))
        o[_rows(n), :] = _of_rows(y).astype(o.dtype)
        return h

    state[...] = lax.fori_loop(0, plan.groups, step, state[...])

    @pl.when(is_last)
    def _():
        last[...] = state[...]


# --- Tangent ----------------------------------------------------------------------------------------------------------


def state_space_v1_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: StateSpaceSpec, config: RecurrenceConfig
) -> Outputs:
    """The tangents of y and of the final state; a tangent of None is zero."""
    x, plan = primals, plan_of(primals, config)
    moving = {name: a for name, a in x._asdict().items() if a is not None and name not in ("spans", "initial_state")}
    dots = {name: jnp.zeros_like(a) if (t := getattr(tangents, name)) is None else t for name, a in moving.items()}
    order, first_dot = order_of(x, plan), first_states(tangents.initial_state, plan)
    arrays, dots = arrays_of(x, order, plan), arrays_of(x._replace(**dots), order, plan)
    specs = Specs(plan)
    of_arrays, of_sequence = specs.of_arrays(arrays), specs.of_sequence(plan.d)
    o, last = launch(
        _tangent_kernel, "state_space_v1_tangent", plan, order.table,
        (arrays, dots, first_states(x.initial_state, plan), first_dot),
        [of_arrays, specs.of_arrays(dots), of_sequence, of_sequence],
        [(specs.of_tokens(), tokens_type(plan, x.x.dtype)), (of_sequence, plan.state)],
        [(plan.d,)] * 2,
    )  # fmt: skip
    return Outputs(in_sequence(o, order, plan), final_states(last, first_dot, order))


def _tangent_kernel(plan, table, arrays, dots, first, first_dot, o_dot, last_dot, state, state_dot):
    is_first, is_last = first_and_last(plan, table)

    @pl.when(is_first)
    def _():
        state[...], state_dot[...] = first[...], first_dot[...]

    def step(n, carry):
        h, h_dot = carry
        of = lambda arrays, h: (arrays.A[...], arrays.D[...], h, _read(arrays, n))
        (h, _), (h_dot, y_dot) = jax.jvp(tokens_of_group, of(arrays, h), of(dots, h_dot))
        o_dot[_rows(n), :] = _of_rows(y_dot).astype(o_dot.dtype)
        return h, h_dot

    state[...], state_dot[...] = lax.fori_loop(0, plan.groups, step, (state[...], state_dot[...]))

    @pl.when(is_last)
    def _():
        last_dot[...] = state_dot[...]


# --- Backward ---------------------------------------------------------------------------------------------------------


def state_space_v1_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: StateSpaceSpec,
    config: RecurrenceConfig,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in `wrt`, in that order."""
    x, plan = primals, plan_of(primals, config)
    order, specs = order_of(x, plan), Specs(plan, back=True)
    arrays, dlast = arrays_of(x, order, plan), first_states(cotangents.final_state, plan)
    *_, states = _forward(arrays, first_states(x.initial_state, plan), order, plan, keep=True)
    dy = jnp.zeros(x.x.shape, x.x.dtype) if cotangents.o is None else cotangents.o
    parts = jax.ShapeDtypeStruct((plan.b, plan.blocks, plan.count * plan.groups, plan.d, GROUP), jnp.float32)
    of_skip = jax.ShapeDtypeStruct((plan.b, plan.n, 1, 1, plan.h), jnp.float32)
    of_tokens = specs.of_tokens(), tokens_type(plan, jnp.float32)
    of_sequence = specs.of_sequence(plan.d), plan.state
    dA, dD, dx, ddt, dB, dC, dfirst = launch(
        _backward_kernel, "state_space_v1_backward", plan, order.table,
        (arrays, states, ordered(dy[:, :, None], order, plan)[:, 0], dlast),
        [specs.of_arrays(arrays), specs.of_states(), of_tokens[0], of_sequence[0]],
        [
            of_sequence, (specs.of_sequence(1), of_skip), of_tokens, of_tokens,
            *[(specs.of_parts(), parts)] * 2, of_sequence,
        ],
        [(plan.d,), (plan.d,), (1,), (plan.groups, plan.d)],
    )  # fmt: skip
    of_groups = lambda a: in_sequence(a.sum(1).swapaxes(2, 3).reshape(plan.b, -1, plan.d), order, plan)
    # The gradients of sequences without tokens are not written.
    of_sequences = lambda a: final_states(a, jnp.zeros_like(a), order).sum(1)
    found = {
        "x": lambda: in_sequence(dx, order, plan),
        "A": lambda: of_sequences(dA),
        "B": lambda: of_groups(dB),
        "C": lambda: of_groups(dC),
        "dt": lambda: in_sequence(ddt, order, plan),
        "D": lambda: of_sequences(dD)[..., 0],
        "initial_state": lambda: final_states(dfirst, dlast, order),
    }
    return tuple(as_operand(found[name](), getattr(x, name)) for name in wrt)


def _backward_kernel(
    plan, table, arrays, states, dy, dlast, dA, dD, dx, ddt, dB, dC, dfirst, dstate, of_A, of_D, begins
):
    is_first, is_last = first_and_last(plan, table, back=True)

    @pl.when(is_first)
    def _():
        dstate[...] = dlast[...]
        of_A[...], of_D[...] = jnp.zeros_like(of_A), jnp.zeros_like(of_D)

    A, D = arrays.A[...], arrays.D[...]

    def forwards(n, h):
        begins[n] = h
        return tokens_of_group(A, D, h, _read(arrays, n))[0]

    lax.fori_loop(0, plan.groups, forwards, states[...])

    def backwards(i, dh):
        n = plan.groups - 1 - i
        of_y = dy[_rows(n), :].astype(jnp.float32)
        _, pull = jax.vjp(tokens_of_group, A, D, begins[n], _read(arrays, n))
        of_group = pull((dh, tuple(of_y[t : t + 1] for t in range(GROUP))))
        of_A[...] += of_group[0]
        of_D[...] += of_group[1]
        dx[_rows(n), :], ddt[_rows(n), :] = _of_rows(of_group[3].x), _of_rows(of_group[3].dt)
        dB[n], dC[n] = _of_columns(of_group[3].B), _of_columns(of_group[3].C)
        return of_group[2]

    dstate[...] = lax.fori_loop(0, plan.groups, backwards, dstate[...])

    @pl.when(is_last)
    def _():
        dfirst[...] = dstate[...]
        dA[...], dD[...] = of_A[...], of_D[...]
