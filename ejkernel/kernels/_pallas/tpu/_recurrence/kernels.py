"""The kernels of the linear recurrence on TPU: a program walks along the chunks of one head, the state in its memory.

Forward and tangent walk forwards in time. The backward walks back from state to state, which the forward leaves at the
beginning of each chunk; within a chunk it computes the states once more. What JAX differentiates is `block`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import KernelConfig

from .block import Tokens, block

ORDER = ("parallel", "parallel", "arbitrary")


class Plan(NamedTuple):
    """Batch, query heads, key/value heads, tokens, features of keys and values; tokens of a chunk and of a block."""

    b: int
    h: int
    g: int
    s: int
    d: int
    e: int
    chunk: int
    block: int
    scale: float
    reverse: bool

    @property
    def count(self) -> int:
        return -(-self.s // self.chunk)

    def of_tokens(self, width: int, group: bool = False, back: bool = False) -> pl.BlockSpec:
        """A chunk of [b,h,s,width]."""
        # Mosaic lowers `//` only where the device is known.
        head = (lambda h: lax.div(h, self.h // self.g)) if group else (lambda h: h)
        at = (lambda i: self.count - 1 - i) if back else (lambda i: i)
        return pl.BlockSpec((None, None, self.chunk, width), lambda b, h, i: (b, head(h), at(i), 0))

    def of_state(self) -> pl.BlockSpec:
        """The state [e,d] of a head, of [b,h,e,d]."""
        return pl.BlockSpec((None, None, self.e, self.d), lambda b, h, i: (b, h, 0, 0))

    def of_states(self, back: bool = False) -> pl.BlockSpec:
        """That of a chunk, of [b,h,count,e,d]."""
        at = (lambda i: self.count - 1 - i) if back else (lambda i: i)
        return pl.BlockSpec((None, None, None, self.e, self.d), lambda b, h, i: (b, h, at(i), 0, 0))

    def shapes(self, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Of o, of a state, and of the states of all chunks."""
        tokens = (self.b, self.h, self.count * self.chunk)
        return {
            "o": jax.ShapeDtypeStruct((*tokens, self.e), dtype),
            "state": jax.ShapeDtypeStruct((self.b, self.h, self.e, self.d), jnp.float32),
            "states": jax.ShapeDtypeStruct((self.b, self.h, self.count, self.e, self.d), jnp.float32),
        }


def _plan(x: Operands, spec: RecurrenceSpec, config: KernelConfig) -> Plan:
    (b, s, h, d), (_, _, g, e) = x.q.shape, x.v.shape
    size = min(config.block_k, config.block_q)
    return Plan(b, h, g, s, d, e, config.block_q // size * size, size, spec.softmax_scale, spec.reverse)


# --- Operands in the layout of the kernels ----------------------------------------------------------------------------


def _tokens(x: Operands, plan: Plan) -> Tokens:
    """[b,h,count·chunk,…] in the order of time, 0 after the last token; decays in float32."""
    parts = (x.q, x.k, x.v, _gates_of_heads(x), None if x.gk is None else x.gk.astype(jnp.float32))
    return Tokens(*(None if a is None else _ordered(a, plan) for a in parts))


def _ordered(a: Array, plan: Plan) -> Array:
    """[b,s,h,…] -> [b,h,count·chunk,…]."""
    a = lax.rev(a, (1,)) if plan.reverse else a
    a = jnp.pad(a, [(0, plan.count * plan.chunk - n if i == 1 else 0) for i, n in enumerate(a.shape)])
    return a.transpose(0, 2, 1, 3)


def _unordered(a: Array, plan: Plan) -> Array:
    """[b,h,count·chunk,…] -> [b,s,h,…]."""
    a = a.transpose(0, 2, 1, 3)[:, : plan.s]
    return lax.rev(a, (1,)) if plan.reverse else a


def _gates_of_heads(x: Operands) -> Array | None:
    """g + g_gamma [b,s,h,1], None where both are absent."""
    gates = [] if x.g is None else [x.g.astype(jnp.float32)]
    gates += [] if x.g_gamma is None else [jnp.broadcast_to(x.g_gamma.astype(jnp.float32)[:, None], x.q.shape[:3])]
    return sum(gates)[..., None] if gates else None


def _state(x: Operands, plan: Plan) -> Array:
    """[b,h,e,d]."""
    if x.initial_state is None:
        return jnp.zeros((plan.b, plan.h, plan.e, plan.d), jnp.float32)
    return x.initial_state[:, 0].astype(jnp.float32).swapaxes(2, 3)


def _specs(tokens: Tokens, plan: Plan, back: bool = False) -> Tokens:
    widths = (plan.d, plan.d, plan.e, 1, plan.d)
    groups = (False, True, True, False, False)
    specs = zip(tokens, widths, groups, strict=True)
    return Tokens(*(None if a is None else plan.of_tokens(width, group, back) for a, width, group in specs))


def _read(tokens: Tokens, n: int, plan: Plan) -> Tokens:
    """Block n of the chunk that is there, in float32."""
    part = pl.ds(n * plan.block, plan.block)
    return Tokens(*(None if a is None else a[part, :].astype(jnp.float32) for a in tokens))


def _blocks(plan: Plan) -> range:
    return range(plan.chunk // plan.block)


# --- Forward ----------------------------------------------------------------------------------------------------------


def recurrence(*operands: Array | None, spec: RecurrenceSpec, config: KernelConfig) -> Outputs:
    """o and the final state."""
    x = Operands(*operands)
    plan = _plan(x, spec, config)
    o, state, _ = _forward(_tokens(x, plan), _state(x, plan), plan, keep=False)
    return Outputs(_unordered(o, plan), state.swapaxes(2, 3)[:, None])


def _forward(tokens: Tokens, state: Array, plan: Plan, keep: bool) -> tuple[Array, Array, Array | None]:
    """o, the final state, and to `keep` the states in which the chunks begin."""
    shapes = plan.shapes(tokens.q.dtype)
    return pl.pallas_call(
        partial(_forward_kernel, plan),
        grid=(plan.b, plan.h, plan.count),
        in_specs=[_specs(tokens, plan), plan.of_state()],
        out_specs=[plan.of_tokens(plan.e), plan.of_state(), plan.of_states() if keep else None],
        out_shape=[shapes["o"], shapes["state"], shapes["states"] if keep else None],
        scratch_shapes=[pltpu.VMEM((plan.e, plan.d), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=ORDER),
        name="recurrence_forward",
    )(tokens, state)


def _forward_kernel(plan, tokens, first, o, last, states, state):
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = first[...]

    h = state[...]
    if states is not None:
        states[...] = h
    for n in _blocks(plan):
        h, out = block(plan.scale, h, _read(tokens, n, plan))
        o[pl.ds(n * plan.block, plan.block), :] = out.astype(o.dtype)
    state[...] = h

    @pl.when(pl.program_id(2) == plan.count - 1)
    def _():
        last[...] = h


# --- Tangent ----------------------------------------------------------------------------------------------------------


def recurrence_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: RecurrenceSpec, config: KernelConfig
) -> Outputs:
    """The tangents of o and the final state."""
    x, dx = primals, tangents
    plan = _plan(x, spec, config)
    # A decay of the head moves with g or with g_gamma; where a decay is absent, so is its tangent.
    moving = dx._replace(q=jnp.zeros_like(x.q) if dx.q is None else dx.q)
    tokens, dots = _tokens(x, plan), _tokens(moving, plan)
    shapes = plan.shapes(tokens.q.dtype)
    o, state = pl.pallas_call(
        partial(_tangent_kernel, plan),
        grid=(plan.b, plan.h, plan.count),
        in_specs=[_specs(tokens, plan), _specs(dots, plan), plan.of_state(), plan.of_state()],
        out_specs=[plan.of_tokens(plan.e), plan.of_state()],
        out_shape=[shapes["o"], shapes["state"]],
        scratch_shapes=[pltpu.VMEM((plan.e, plan.d), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=ORDER),
        name="recurrence_tangent",
    )(tokens, dots, _state(x, plan), _state(dx, plan))
    return Outputs(_unordered(o, plan), state.swapaxes(2, 3)[:, None])


def _tangent_kernel(plan, tokens, dots, first, first_dot, o_dot, last_dot, state, state_dot):
    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...], state_dot[...] = first[...], first_dot[...]

    h, h_dot = state[...], state_dot[...]
    for n in _blocks(plan):
        x, dx = _read(tokens, n, plan), _read(dots, n, plan)
        dx = Tokens(*(None if a is None else jnp.zeros_like(a) if t is None else t for a, t in zip(x, dx, strict=True)))
        (h, _), (h_dot, out) = jax.jvp(partial(block, plan.scale), (h, x), (h_dot, dx))
        o_dot[pl.ds(n * plan.block, plan.block), :] = out.astype(o_dot.dtype)
    state[...], state_dot[...] = h, h_dot

    @pl.when(pl.program_id(2) == plan.count - 1)
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
    config: KernelConfig,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""
    x = primals
    plan = _plan(x, spec, config)
    tokens, first = _tokens(x, plan), _state(x, plan)
    do = jnp.zeros((plan.b, plan.s, plan.h, plan.e), x.q.dtype) if cotangents.o is None else cotangents.o
    dlast = _state(Operands(None, None, None, initial_state=cotangents.final_state), plan)
    _, _, states = _forward(tokens, first, plan, keep=True)
    wide = Tokens(plan.d, plan.d, plan.e, None if tokens.g is None else 1, None if tokens.gk is None else plan.d)
    of_head = lambda width: jax.ShapeDtypeStruct((plan.b, plan.h, plan.count * plan.chunk, width), jnp.float32)
    gradients, dstate = pl.pallas_call(
        partial(_backward_kernel, plan),
        grid=(plan.b, plan.h, plan.count),
        in_specs=[
            _specs(tokens, plan, back=True),
            plan.of_states(back=True),
            plan.of_tokens(plan.e, back=True),
            plan.of_state(),
        ],
        out_specs=[Tokens(*(n and plan.of_tokens(n, back=True) for n in wide)), plan.of_state()],
        out_shape=[Tokens(*(n and of_head(n) for n in wide)), plan.shapes(x.q.dtype)["state"]],
        scratch_shapes=[pltpu.VMEM((plan.e, plan.d), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=ORDER),
        name="recurrence_backward",
    )(tokens, states, _ordered(do, plan), dlast)
    found = {name: None if a is None else _unordered(a, plan) for name, a in gradients._asdict().items()}
    totals = {
        "q": lambda: found["q"],
        "k": lambda: _of_groups(found["k"], plan),
        "v": lambda: _of_groups(found["v"], plan),
        "g": lambda: found["g"][..., 0],
        "gk": lambda: found["gk"],
        "g_gamma": lambda: found["g"][..., 0].sum((0, 1) if x.g_gamma.shape[0] == 1 else 1).reshape(x.g_gamma.shape),
        "initial_state": lambda: dstate.swapaxes(2, 3)[:, None],
    }
    return tuple(totals[name]().astype(getattr(x, name).dtype) for name in wrt)


def _of_groups(a: Array, plan: Plan) -> Array:
    """[b,s,h,…] -> [b,s,g,…]: the sums over the query heads that share a key/value head."""
    return a.reshape(*a.shape[:2], plan.g, plan.h // plan.g, a.shape[3]).sum(3)


def _backward_kernel(plan, tokens, states, do, dlast, gradients, dfirst, dstate):
    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate[...] = dlast[...]

    begins = [states[...]]
    for n in _blocks(plan)[:-1]:
        begins.append(block(plan.scale, begins[-1], _read(tokens, n, plan))[0])
    dh = dstate[...]
    for n in reversed(_blocks(plan)):
        part = pl.ds(n * plan.block, plan.block)
        _, pull = jax.vjp(partial(block, plan.scale), begins[n], _read(tokens, n, plan))
        dh, found = pull((dh, do[part, :].astype(jnp.float32)))
        for out, gradient in zip(gradients, found, strict=True):
            if out is not None:
                out[part, :] = gradient
    dstate[...] = dh

    @pl.when(pl.program_id(2) == plan.count - 1)
    def _():
        dfirst[...] = dh
