"""The kernels of linear recurrences on TPU: a loop over the chunks of a head, with the state in vector memory.

Forward and tangent loop forwards in time, the backward loops backwards. It reads the initial state of each chunk, which
the forward has written, and recomputes the states of the blocks within the chunk. JAX differentiates `block`, so the
kernels of tangent and backward need no equations of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.sums import exact_sum

from .block import Tokens, block
from .layout import Order, Plan, first_and_last, of_all_sequences, order_of, ordered, plan, state_of, unordered


def _launch(kernel, name: str, plan: Plan, table: Array, operands: tuple, in_specs: list, outputs: list, states: int):
    """Runs `kernel(plan, table, *operands, *outputs, *states)`; `outputs` are pairs (block spec, shape)."""
    specs, shapes = zip(*outputs, strict=True)
    return pl.pallas_call(
        partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=plan.grid,
            in_specs=in_specs,
            out_specs=list(specs),
            scratch_shapes=[pltpu.VMEM((plan.part, plan.d), jnp.float32)] * states,
        ),
        out_shape=list(shapes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name=name,
    )(table, *operands)


def _tokens(x: Operands, beta: Array | None, order: Order, plan: Plan) -> Tokens:
    """The operands in the layout of the kernels, decays and beta in float32."""
    wide = lambda a: None if a is None else a.astype(jnp.float32)
    beta = None if beta is None else wide(beta)[..., None]
    parts = (x.q, x.k, x.v, _gates_of_heads(x), wide(x.gk), wide(x.gv), beta)
    return Tokens(*(None if a is None else ordered(a, order, plan) for a in parts))


def _gates_of_heads(x: Operands) -> Array | None:
    """g + g_gamma [b,s,h,1], None if both are absent."""
    gates = [] if x.g is None else [x.g.astype(jnp.float32)]
    if x.g_gamma is not None:
        (b, s), gamma = x.q.shape[:2], x.g_gamma.astype(jnp.float32)[:, None]
        gates.append(jnp.broadcast_to(gamma, (b, s, gamma.shape[2])))
    return sum(gates)[..., None] if gates else None


def _specs(tokens: Tokens, plan: Plan, back: bool = False) -> Tokens:
    of_keys, of_values = (
        lambda a: plan.of_keys(a.shape[3], a.shape[1], back),
        lambda a: plan.of_values(a.shape[1], back),
    )
    at = Tokens(of_keys, of_keys, of_values, of_keys, of_keys, of_values, of_keys)
    return Tokens(*(None if a is None else of(a) for a, of in zip(tokens, at, strict=True)))


def _read(tokens: Tokens, n: int, plan: Plan) -> Tokens:
    """Block n of the current chunk, in float32."""
    part = pl.ds(n * plan.block, plan.block)
    return Tokens(*(None if a is None else a[part, :].astype(jnp.float32) for a in tokens))


def _block(plan: Plan) -> Callable[[Array, Tokens], tuple[Array, Array]]:
    return partial(block, plan.scale, plan.normalises)


def _blocks(plan: Plan) -> range:
    return range(plan.chunk // plan.block)


# --- Forward ----------------------------------------------------------------------------------------------------------


def recurrence(
    *operands: Array | None,
    spec: RecurrenceSpec,
    config: RecurrenceConfig,
    beta: Array | None = None,
    normalises: bool = False,
) -> Outputs:
    """o and the final state; with beta [b,s,h] by the delta rule, from q and k that it may normalise."""
    x = Operands(*operands)
    size = plan(x, spec, config, normalises)
    order, first = order_of(x, size), state_of(x.initial_state, size)
    o, state, _ = _forward(_tokens(x, beta, order, size), first, order, size, keep=False)
    return Outputs(unordered(o, order, size), of_all_sequences(state, first, order))


def _forward(tokens: Tokens, first: Array, order: Order, plan: Plan, keep: bool) -> tuple[Array, Array, Array | None]:
    """o, the final state, and with `keep` the initial state of each chunk."""
    return _launch(
        _forward_kernel,
        "recurrence_forward",
        plan,
        order.table,
        (tokens, first),
        [_specs(tokens, plan), plan.of_state()],
        [
            (plan.of_values(plan.h), plan.tokens(plan.h, plan.e, tokens.v.dtype)),
            (plan.of_state(), plan.state),
            (plan.of_states(), plan.states) if keep else (None, None),
        ],
        states=1,
    )


def _forward_kernel(plan, table, tokens, first, o, last, states, state):
    is_first, is_last = first_and_last(plan, table)

    @pl.when(is_first)
    def _():
        state[...] = first[...]

    h = state[...]
    if states is not None:
        states[...] = h
    for n in _blocks(plan):
        h, out = _block(plan)(h, _read(tokens, n, plan))
        o[pl.ds(n * plan.block, plan.block), :] = out.astype(o.dtype)
    state[...] = h

    @pl.when(is_last)
    def _():
        last[...] = h


# --- Tangent ----------------------------------------------------------------------------------------------------------


def recurrence_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: RecurrenceSpec,
    config: RecurrenceConfig,
    beta: tuple[Array | None, Array | None] = (None, None),
    normalises: bool = False,
) -> Outputs:
    """The tangents of o and the final state; beta with its own."""
    x, dx = primals, tangents
    size = plan(x, spec, config, normalises)
    order, first_dot = order_of(x, size), state_of(dx.initial_state, size)
    # The decay of a head has a tangent from g or from g_gamma; an absent decay has none.
    moving = dx._replace(q=jnp.zeros_like(x.q) if dx.q is None else dx.q)
    tokens, dots = (_tokens(*of, order, size) for of in zip((x, moving), beta, strict=True))
    o, state = _launch(
        _tangent_kernel,
        "recurrence_tangent",
        size,
        order.table,
        (tokens, dots, state_of(x.initial_state, size), first_dot),
        [_specs(tokens, size), _specs(dots, size), size.of_state(), size.of_state()],
        [(size.of_values(size.h), size.tokens(size.h, size.e, x.v.dtype)), (size.of_state(), size.state)],
        states=2,
    )
    return Outputs(unordered(o, order, size), of_all_sequences(state, first_dot, order))


def _tangent_kernel(plan, table, tokens, dots, first, first_dot, o_dot, last_dot, state, state_dot):
    is_first, is_last = first_and_last(plan, table)

    @pl.when(is_first)
    def _():
        state[...], state_dot[...] = first[...], first_dot[...]

    h, h_dot = state[...], state_dot[...]
    for n in _blocks(plan):
        x, dx = _read(tokens, n, plan), _read(dots, n, plan)
        dx = Tokens(*(None if a is None else jnp.zeros_like(a) if t is None else t for a, t in zip(x, dx, strict=True)))
        (h, _), (h_dot, out) = jax.jvp(_block(plan), (h, x), (h_dot, dx))
        o_dot[pl.ds(n * plan.block, plan.block), :] = out.astype(o_dot.dtype)
    state[...], state_dot[...] = h, h_dot

    @pl.when(is_last)
    def _():
        last_dot[...] = h_dot


# --- Backward ---------------------------------------------------------------------------------------------------------


def recurrence_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: RecurrenceSpec,
    config: RecurrenceConfig,
    beta: Array | None = None,
    normalises: bool = False,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in `wrt`, beta among them, in that order."""
    x = primals
    size = plan(x, spec, config, normalises)
    order, first = order_of(x, size), state_of(x.initial_state, size)
    tokens, dlast = _tokens(x, beta, order, size), state_of(cotangents.final_state, size)
    do = jnp.zeros((size.b, size.s, size.h, size.e), x.v.dtype) if cotangents.o is None else cotangents.o
    _, _, states = _forward(tokens, first, order, size, keep=True)
    outputs = _gradients(tokens, size)
    *found, dfirst = _launch(
        _backward_kernel,
        "recurrence_backward",
        size,
        order.table,
        (tokens, states, ordered(do, order, size), dlast),
        [
            _specs(tokens, size, back=True),
            size.of_states(back=True),
            size.of_values(size.h, back=True),
            size.of_state(back=True),
        ],
        [*outputs, (size.of_state(back=True), size.state)],
        states=1,
    )
    found = {
        name: None if a is None else unordered(a, order, size) for name, a in zip(Tokens._fields, found, strict=True)
    }
    of_parts = lambda name: found[name].reshape(size.b, size.s, size.h, size.parts, -1).sum(3)
    of_heads = lambda name: of_parts(name)[..., 0]
    of_gates = partial(of_heads, "g")
    of_groups = lambda a, like: a.reshape(*a.shape[:2], like.shape[2], -1, a.shape[3]).sum(3)
    totals = {
        "q": lambda: of_groups(of_parts("q"), x.q),
        "k": lambda: of_groups(of_parts("k"), x.k),
        "v": lambda: of_groups(found["v"], x.v),
        "g": of_gates,
        "beta": partial(of_heads, "beta"),
        "gk": lambda: of_parts("gk"),
        "gv": lambda: found["gv"],
        "g_gamma": lambda: exact_sum(of_gates(), (0, 1) if x.g_gamma.shape[0] == 1 else (1,)).reshape(x.g_gamma.shape),
        "initial_state": lambda: of_all_sequences(dfirst, dlast, order),
    }
    dtypes = {name: a.dtype for name, a in (x._asdict() | dict(beta=beta)).items() if a is not None}
    return tuple(totals[name]().astype(dtypes[name]) for name in wrt)


def _gradients(tokens: Tokens, plan: Plan) -> list[tuple[Any, Any]]:
    """Block specs and shapes of gradients: one per part of a head for shared operands, [b,h·parts,tokens,…]."""
    heads = plan.h * plan.parts
    shared = lambda width: (plan.of_keys(width, heads, back=True), plan.tokens(heads, width))
    own = (plan.of_values(plan.h, back=True), plan.tokens(plan.h, plan.e))
    outputs = Tokens(shared(plan.d), shared(plan.d), own, shared(1), shared(plan.d), own, shared(1))
    return [(None, None) if a is None else output for a, output in zip(tokens, outputs, strict=True)]


def _backward_kernel(plan, table, tokens, states, do, dlast, *rest):
    *gradients, dfirst, dstate = rest
    is_first, is_last = first_and_last(plan, table, back=True)

    @pl.when(is_first)
    def _():
        dstate[...] = dlast[...]

    begins = [states[...]]
    for n in _blocks(plan)[:-1]:
        begins.append(_block(plan)(begins[-1], _read(tokens, n, plan))[0])
    dh = dstate[...]
    for n in reversed(_blocks(plan)):
        part = pl.ds(n * plan.block, plan.block)
        _, pull = jax.vjp(_block(plan), begins[n], _read(tokens, n, plan))
        dh, found = pull((dh, do[part, :].astype(jnp.float32)))
        for out, gradient in zip(gradients, found, strict=True):
            if out is not None:
                out[part, :] = gradient
    dstate[...] = dh

    @pl.when(is_last)
    def _():
        dfirst[...] = dh
