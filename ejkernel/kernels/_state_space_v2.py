"""Mamba-2's state space by the kernels of the linear recurrence: the computations before and after these.

With queries C, keys B, values v_t = dt_t · x_t and a decay g_t = dt_t · A of each head,

    h_t = exp(g_t) · h_{t−1} + B_t v_tᵀ,    o_t = C_tᵀ h_t,    y_t = o_t + D · x_t

is the recurrence, whose state is that of the operation transposed. Hence the tangents that it is given, and that of y:

    v̇ = dṫ · x + dt · ẋ,    ġ = dṫ · A + dt · Ȧ,    ẏ = ȯ + Ḋ · x + D · ẋ

The cotangent of o is that of y. With dv and dg, the cotangents of values and decays,

    dx = dt · dv + D · dy,    ddt = Σ_e dv ∘ x + A · dg,    dA = Σ_t dt · dg,    dD = Σ_t Σ_e dy ∘ x

and dB and dC are those of keys and queries. Values, decays and what is made of their cotangents are float32, so that
nothing is rounded between x and a product of matrices, or between o and y.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives._recurrence import Operands as Recurrence
from ejkernel.primitives._recurrence import Outputs as States
from ejkernel.primitives._recurrence import RecurrenceSpec
from ejkernel.primitives.state_space_v2 import Operands, Outputs, StateSpaceSpec
from ejkernel.types.recurrence import RecurrenceConfig
from ejkernel.xla_utils.sums import exact_sum

SPEC = RecurrenceSpec()
Supports = Callable[[RecurrenceSpec, Recurrence, Any], str | None]


def shapes_of(x: Operands) -> Recurrence:
    """The operands of the recurrence, without contents, for those of a call (arrays or shapes)."""
    array, dtype = jax.ShapeDtypeStruct, dtype_of_products(x)
    state = x.initial_state
    if state is not None:
        state = array((*state.shape[:3], state.shape[4], state.shape[3]), jnp.float32)
    q, k = (array(a.shape, dtype) for a in (x.C, x.B))
    v, g = (array(a.shape, jnp.float32) for a in (x.x, x.dt))
    return Recurrence(q, k, v, g, initial_state=state, spans=x.spans)


def refusal(supports: Supports, x: Operands, target: Any) -> str | None:
    """Why the kernels do not take a call, or None."""
    if reason := supports(SPEC, shapes_of(x), target):
        return f"{reason} (here q is C, k is B and v is dt · x)"
    return None


def by_kernels(
    recurrence: Callable[..., States], recurrence_jvp: Callable[..., States], recurrence_bwd: Callable[..., tuple]
) -> tuple[Callable[..., Any], ...]:
    """The forward, tangent and backward of the operation by the kernels of a platform for the linear recurrence."""

    def state_space_v2(*operands: Array | None, spec: StateSpaceSpec, config: RecurrenceConfig) -> Outputs:
        return forward(partial(recurrence, spec=SPEC, config=config), Operands(*operands))

    def state_space_v2_jvp(
        primals: Operands, outputs: Outputs, tangents: Operands, *, spec: StateSpaceSpec, config: RecurrenceConfig
    ) -> Outputs:
        push = lambda x, dot: recurrence_jvp(x, None, dot, spec=SPEC, config=config)
        return tangent(push, primals, tangents)

    def state_space_v2_bwd(
        primals: Operands, outputs: Outputs, cotangents: Outputs, *, wrt: tuple[str, ...], spec: StateSpaceSpec,
        config: RecurrenceConfig,
    ) -> tuple[Array, ...]:  # fmt: skip
        x, bar = of_sequences_alone(primals, cotangents)
        pull = lambda x, bar, wrt: recurrence_bwd(x, None, bar, wrt=wrt, spec=SPEC, config=config)
        return backward(partial(cotangents_by, pull, x, bar), x, bar.o, wrt)

    return state_space_v2, state_space_v2_jvp, state_space_v2_bwd


def forward(recurrence: Callable[..., States], x: Operands) -> Outputs:
    """y and the final state; `recurrence` takes the operands of a recurrence."""
    x = with_zeros(x)
    o, state = recurrence(*_recurrence(x))
    if x.D is not None:
        o = o + _of_heads(x.D) * _wide(x.x)
    return Outputs(of_sequences(o, x).astype(x.x.dtype), _transposed(state))


def tangent(recurrence_jvp: Callable[..., States], x: Operands, dot: Operands) -> Outputs:
    """The tangents of both; `recurrence_jvp` takes the primals of a recurrence and their tangents."""
    x, dot = with_zeros(x), with_zeros(dot, x)
    u, dt = _wide(x.x), _wide(x.dt)
    of_dt = None if dot.dt is None else _wide(dot.dt)
    o, state = recurrence_jvp(
        _recurrence(x),
        Recurrence(
            *(None if a is None else a.astype(dtype_of_products(x)) for a in (dot.C, dot.B)),
            v=_sum(
                None if of_dt is None else of_dt[..., None] * u,
                None if dot.x is None else dt[..., None] * _wide(dot.x),
            ),
            g=_sum(
                None if of_dt is None else of_dt * _wide(x.A)[:, None],
                None if dot.A is None else dt * _wide(dot.A)[:, None],
            ),
            initial_state=_transposed(dot.initial_state),
        ),
    )
    of_D = None if dot.D is None else _of_heads(dot.D) * u
    of_x = None if dot.x is None or x.D is None else _of_heads(x.D) * _wide(dot.x)
    return Outputs(of_sequences(_sum(o, of_D, of_x), x).astype(x.x.dtype), _transposed(state))


def of_sequences_alone(x: Operands, cotangents: Outputs) -> tuple[Operands, Outputs]:
    """Operands and cotangents with zeros for x, dt and the cotangent of y in tokens of no sequence."""
    dy = cotangents.o
    return with_zeros(x), cotangents._replace(o=None if dy is None else of_sequences(dy, x))


def backward(
    pull: Callable[[tuple[str, ...]], tuple], x: Operands, dy: Array | None, wrt: tuple[str, ...]
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; x and dy hold zeros in tokens of no sequence.

    `pull` takes names and gives cotangents: of q, k, g and initial_state of the recurrence, of x by the name v, by the
    name dt that of the dt in its values, and by the name skip those of D of each token.
    """
    needed = dict(q={"C"}, k={"B"}, v={"x"}, dt={"dt"}, g={"A", "dt"}, initial_state={"initial_state"})
    needed |= {} if dy is None else dict(skip={"D"})
    names = tuple(name for name, operands in needed.items() if operands & set(wrt))
    of = dict(zip(names, pull(names), strict=True)) if names else {}
    of_batch = lambda a, like: exact_sum(a, (0, 1) if like.shape[0] == 1 else (1,)).reshape(like.shape)
    gradients = {
        "x": lambda: of["v"],
        "A": lambda: of_batch(_wide(x.dt) * of["g"], x.A),
        "B": lambda: of["k"],
        "C": lambda: of["q"],
        "dt": lambda: of["dt"] + _wide(x.A)[:, None] * of["g"],
        "D": lambda: jnp.zeros_like(x.D) if dy is None else of_batch(of["skip"], x.D),
        "initial_state": lambda: of["initial_state"],
    }
    return tuple(gradients[name]().astype(getattr(x, name).dtype) for name in wrt)


def cotangents_by(
    recurrence_bwd: Callable[..., tuple], x: Operands, cotangents: Outputs, names: tuple[str, ...]
) -> tuple[Array, ...]:
    """What `backward` asks for, by the backward of a recurrence with values dt · x."""
    dy, dt = cotangents.o, _wide(x.dt)
    asked = tuple(name for name in ("q", "k", "v", "g", "initial_state") if name in names)
    asked += ("v",) if "dt" in names and "v" not in names else ()
    states = States(dy, _transposed(cotangents.final_state))
    of = dict(zip(asked, recurrence_bwd(_recurrence(x), states, asked), strict=True)) if asked else {}
    skipped = None if dy is None or x.D is None else _of_heads(x.D) * _wide(dy)
    found = {
        "v": lambda: _sum(dt[..., None] * of["v"], skipped),
        "dt": lambda: (of["v"] * _wide(x.x)).sum(-1),
        "skip": lambda: (_wide(dy) * _wide(x.x)).sum(-1),
        "initial_state": lambda: _transposed(of["initial_state"]),
    }
    return tuple(found[name]() if name in found else of[name] for name in names)


def _recurrence(x: Operands) -> Recurrence:
    dtype, dt = dtype_of_products(x), _wide(x.dt)
    v, g = dt[..., None] * _wide(x.x), dt * _wide(x.A)[:, None]
    q, k = x.C.astype(dtype), x.B.astype(dtype)
    return Recurrence(q, k, v, g, initial_state=_transposed(x.initial_state), spans=x.spans)


def dtype_of_products(x: Operands) -> Any:
    """The dtype of matrix products: the narrowest that holds x, B and C."""
    return np.dtype(jnp.result_type(*(a.dtype for a in (x.x, x.B, x.C))))


def with_zeros(a: Operands, of: Operands | None = None) -> Operands:
    """Operands or tangents with zeros for x and dt in tokens of no sequence, which may hold NaN."""
    shown = lambda x: None if x is None else of_sequences(x, of or a)
    return a._replace(x=shown(a.x), dt=shown(a.dt))


def of_sequences(a: Array, x: Operands) -> Array:
    """The array [b,s,…] with zeros for tokens of no sequence."""
    if x.spans is None:
        return a
    token = jnp.arange(a.shape[1], dtype=jnp.int32)
    within = ((x.spans[..., :1] <= token) & (token < x.spans[..., 1:])).any(1)
    return jnp.where(jax.lax.expand_dims(within, range(2, a.ndim)), a, jnp.zeros((), a.dtype))


def _of_heads(a: Array) -> Array:
    """Numbers of heads with the axes of tokens and features, [b?,h] -> [b?,1,h,1]."""
    return _wide(a)[:, None, :, None]


def _wide(a: Array) -> Array:
    return a.astype(jnp.float32)


def _sum(*terms: Array | None) -> Array | None:
    """The sum of the terms that are not None."""
    given = [a for a in terms if a is not None]
    return sum(given[1:], given[0]) if given else None


def _transposed(state: Array | None) -> Array | None:
    """[b,n,h,e,d] -> [b,n,h,d,e], and back."""
    return None if state is None else jnp.swapaxes(state, 3, 4)
