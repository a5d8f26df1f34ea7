"""The linear recurrence in Triton at full size: all gradients and the tangent against the formula in float64.

Each head and each row of the batch is an independent recurrence: the last row is compared with the formula token by
token, and for a single long row one head. In bfloat16 errors are in units of that of rounding the exact result, which
is the error of the formula: it computes in float32 and rounds once. In float32 the unit is the error of the formula.
The gradient of g_gamma is one number a head, for which the ratio of two errors would be chance.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ejkernel.kernels._xla._recurrence import reference
from ejkernel.primitives._recurrence import TABLE, Operands, Outputs

from .device import TARGET
from .recurrence_cases import (
    Case,
    Draw,
    check,
    check_tangent,
    derivatives,
    differentiable,
    directions,
    like,
    poisoned,
    tangent,
)

pytestmark = pytest.mark.gpu

FULL = dict(B=8, H=16, G=16, D=128, V=128)
DENSE = (
    Case("no decay", **FULL),
    Case("by head", dict(g=0.02), **FULL),  # a state of some hundred tokens
    Case("by head and constant, reversed", dict(g=1.0, g_gamma=0.1), reverse=True, **FULL),
    Case("constant, on groups", dict(g_gamma=0.05), **(FULL | dict(G=8))),
    Case("by feature", dict(gk=0.02), **FULL),
    Case("by feature and head, reversed", dict(gk=0.5, g=0.5, g_gamma=0.2), reverse=True, **FULL),
    Case("by value feature", dict(gv=0.05), **FULL),
    Case("all decays", dict(gk=0.2, gv=0.2, g=0.2, g_gamma=0.1), **FULL),
)
PACKED = (
    Case("packed by head", dict(g=0.1, g_gamma=0.05), ends=(0, 0.3, 0.3, 0.65, 1), **FULL),
    Case("packed by feature, reversed", dict(gk=0.1), ends=(0.1, 0.4, 0.7, 0.98), reverse=True, **FULL),
    Case("packed by both features", dict(gk=0.1, gv=0.1), ends=(0, 0.35, 0.65, 1), **FULL),
)
SHORT, LONG = 4096, 32768
CALLS = [
    *((case, SHORT, dtype) for case in DENSE for dtype in (jnp.bfloat16, jnp.float32)),
    *((replace(case, B=1), LONG, jnp.bfloat16) for case in (*DENSE, *PACKED)),
]
at_full_size = pytest.mark.parametrize(
    "case, length, dtype", [pytest.param(*of, id=f"{of[0].name}-{of[0].B}x{of[1]}-{of[2].dtype.name}") for of in CALLS]
)


@at_full_size
def test_gradients(case, length, dtype):
    from ejkernel.kernels._triton._recurrence import recurrence, recurrence_bwd

    x, spec = made(case, length, dtype)
    forward, backward = (f.heuristic(spec, x, TARGET) for f in (recurrence, recurrence_bwd))
    wrt = differentiable(x)
    outputs = jax.jit(lambda x: recurrence(*x, spec=spec, config=forward))(poisoned(x))
    cotangents = like(outputs, ON_DEVICE)
    pull = jax.jit(lambda x, ct: recurrence_bwd(x, None, ct, wrt=wrt, spec=spec, config=backward))
    gradients = dict(zip(wrt, pull(poisoned(x), cotangents), strict=True))
    found = judged(outputs._asdict(), case), judged(gradients, case)
    check((Outputs(**found[0]), found[1]), *by_the_formula(derivatives, case, spec, x, cotangents), dtype)


@at_full_size
def test_tangent(case, length, dtype):
    from ejkernel.kernels._triton._recurrence import recurrence_jvp

    x, spec = made(case, length, dtype)
    tangents = directions(x, ON_DEVICE)
    config = recurrence_jvp.heuristic(spec, x, TARGET)
    found = jax.jit(lambda x, t: recurrence_jvp(x, None, t, spec=spec, config=config))(poisoned(x), tangents)
    found = Outputs(**judged(found._asdict(), case))
    check_tangent(found, *by_the_formula(tangent, case, spec, x, tangents), dtype)


# --- Arrays, drawn on the device, as the host would take seconds


def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def uniform(seed, shape):
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32)


ON_DEVICE = Draw(normal, uniform)


def made(case: Case, length: int, dtype):
    """The operands, with a g_gamma of each row so that its gradient is not summed over rows, and the spec."""
    x, spec = case.make(length, dtype, ON_DEVICE)
    gamma = x.g_gamma if x.g_gamma is None else jnp.broadcast_to(x.g_gamma, (x.q.shape[0], case.H))
    return x._replace(g_gamma=gamma), spec


# --- The judge


def judged(arrays: dict, case: Case) -> dict:
    """The last row or, if it is the only one, its last key/value head with the query heads of that."""
    heads = {"g": slice(-1, None), "h": slice(-case.H // case.G, None)} if case.B == 1 else {}

    def part(name, a):
        return a[tuple({"b": slice(-1, None), **heads}.get(axis.letter, slice(None)) for axis in TABLE[name])]

    return {name: part(name, a) for name, a in arrays.items() if a is not None}


def by_the_formula(derivative, case: Case, spec, x: Operands, along):
    """The derivative in float64, and the results that define the unit of errors."""
    sequences = np.asarray([[[0, x.q.shape[1]]]] if x.spans is None else x.spans)[0]
    function = jax.jit(derivative(partial(in_parts, sequences), spec), compiler_options=OPTIMIZED)
    parts = [type(arrays)(**dict.fromkeys(arrays._fields) | judged(arrays._asdict(), case)) for arrays in (x, along)]
    parts[0] = parts[0]._replace(spans=None)
    # For one head the host computes a token faster than a GPU starts its kernels.
    device = jax.devices("cpu" if case.B == 1 else None)[0]

    def computed(dtype):
        with jax.enable_x64(True):
            return function(*jax.tree.map(lambda a: jax.device_put(a, device).astype(dtype), parts))

    exact = computed(np.float64)
    return exact, computed(np.float32) if x.q.dtype == jnp.float32 else exact


OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
PART = 64
OF_TOKENS = ("q", "k", "v", "g", "gk", "gv")


def in_parts(sequences: np.ndarray, *operands, spec) -> Outputs:
    """The formula, a row for each sequence, part after part from the state that the previous part left.

    Gradients then only store the states between parts.
    """
    x = Operands(*operands)
    first, after = sequences.T
    number, length = len(sequences), x.q.shape[1]
    parts = -(-max(after - first) // PART)
    token = first[:, None] + np.arange(parts * PART)
    token = np.where(token < after[:, None], token, length)

    def cut(a):
        a = a[0].at[token].get(mode="fill", fill_value=0)
        return jnp.moveaxis(a.reshape(number, parts, PART, *a.shape[2:]), 1, 0)

    tokens = {name: cut(a) for name, a in x._asdict().items() if a is not None and name in OF_TOKENS}
    left = np.clip((after - first)[None] - PART * np.arange(parts)[:, None], 0, PART)
    tokens["spans"] = np.stack([np.zeros_like(left), left], -1)[:, :, None].astype(np.int32)

    @jax.checkpoint
    def part(state, tokens):
        o, state = reference(*Operands(**tokens, g_gamma=x.g_gamma, initial_state=state), spec=spec)
        return state, o

    start = jnp.moveaxis(x.initial_state, 1, 0)
    final, o = lax.scan(part, start, tokens, reverse=spec.reverse)
    o = jnp.moveaxis(o, 0, 1).reshape(number, parts * PART, *o.shape[3:])
    o = jnp.zeros((1, length, *o.shape[2:]), o.dtype).at[0, token].set(o, mode="drop")
    return Outputs(o, jnp.moveaxis(final, 0, 1))
