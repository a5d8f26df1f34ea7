"""Runs a traced program by NumPy, one equation after the other: nothing is compiled, which is most of what a formula of
a few small arrays costs, and no code of XLA stands on both sides of a comparison.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

UNITS = 4
"""By how many units of its last place an elementary function may be off."""


def traced(f: Callable) -> Callable:
    """f(*trees), traced at its first call for the shapes of the arguments, and then run by NumPy.

    With `rng`, elementary functions have errors of some units of the last place, like those of compilers.
    """
    programs: dict[Any, tuple] = {}

    def run(*args, rng=None):
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in programs:
            programs[key] = jax.make_jaxpr(f, return_shape=True)(*args)
        program, shapes = programs[key]
        with np.errstate(all="ignore"):
            results = evaluated(program.jaxpr, program.consts, leaves, rng)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def evaluated(jaxpr: Jaxpr, consts: list, args: list, rng: Any = None) -> list:
    """The results of a jaxpr."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(np.asarray, consts), *args), strict=True))
    read = lambda x: np.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else values[x]
    for equation in jaxpr.eqns:
        results = apply(equation, [read(x) for x in equation.invars], rng)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def apply(equation: Any, args: list, rng: Any) -> list:
    """The results of one equation."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _scan(equation, args, rng)
    inner = next((params[p] for p in ("jaxpr", "call_jaxpr", "fun_jaxpr", "callee") if p in params), None)
    if inner is not None:
        inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
        return evaluated(inner.jaxpr, inner.consts, args, rng)
    avals = [x.aval for x in equation.outvars]
    result = ELEMENTWISE[name](*args) if name in ELEMENTWISE else RULES[name](avals[0].shape, *args, **params)
    result = np.asarray(result).astype(avals[0].dtype)
    if rng is not None and name in ("tanh", "exp", "log"):
        result = result * (1 + UNITS * np.finfo(result.dtype).eps * rng.integers(-1, 2, result.shape)).astype(
            result.dtype
        )
    return [result]


def _scan(equation: Any, values: list, rng: Any) -> list:
    """A loop. Scanned arrays have one axis more than in the body; versions of JAX differ in the names of parameters."""
    body, length = equation.params["jaxpr"], equation.params["length"]
    ndims = lambda variables: [x.aval.ndim for x in variables]
    scanned = sum(a != b for a, b in zip(ndims(equation.invars), ndims(body.jaxpr.invars), strict=True))
    carried = sum(a == b for a, b in zip(ndims(equation.outvars), ndims(body.jaxpr.outvars), strict=True))
    first = len(values) - scanned
    consts, carry, xs = values[: first - carried], values[first - carried : first], values[first:]
    rows: list = [None] * length
    for i in reversed(range(length)) if equation.params["reverse"] else range(length):
        out = evaluated(body.jaxpr, body.consts, [*consts, *carry, *(x[i] for x in xs)], rng)
        carry, rows[i] = out[:carried], out[carried:]
    types = [x.aval for x in equation.outvars[carried:]]
    return [*carry, *(np.array([row[n] for row in rows], t.dtype).reshape(t.shape) for n, t in enumerate(types))]


def _dot(to, x, y, *, dimension_numbers, **_):
    (contract_x, contract_y), (batch_x, batch_y) = dimension_numbers
    fresh = iter(range(100))
    of_x, of_y = [next(fresh) for _ in x.shape], [next(fresh) for _ in y.shape]
    for a, b in zip((*contract_x, *batch_x), (*contract_y, *batch_y), strict=True):
        of_y[b] = of_x[a]
    free = lambda of, gone: [n for i, n in enumerate(of) if i not in gone]
    out = [of_x[a] for a in batch_x] + free(of_x, (*batch_x, *contract_x)) + free(of_y, (*batch_y, *contract_y))
    return np.einsum(x, of_x, y, of_y, out, optimize=True)


def _broadcast(to, x, *, broadcast_dimensions, **_):
    own = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([own.get(i, 1) for i in range(len(to))]), to)


def _pad(to, x, value, *, padding_config):
    assert all(low >= 0 and high >= 0 and inside == 0 for low, high, inside in padding_config)
    return np.pad(x, [(low, high) for low, high, _ in padding_config], constant_values=value)


RULES = {
    "dot_general": _dot,
    "broadcast_in_dim": _broadcast,
    "pad": _pad,
    "reshape": lambda out, x, **_: x.reshape(out),
    "squeeze": lambda out, x, **_: x.reshape(out),
    "expand_dims": lambda out, x, **_: x.reshape(out),
    "transpose": lambda out, x, *, permutation: x.transpose(permutation),
    "convert_element_type": lambda out, x, *, new_dtype, **_: x.astype(new_dtype),
    "reduce_precision": lambda out, x, **_: x,
    "reduce_sum": lambda out, x, *, axes, **_: x.sum(tuple(axes), dtype=x.dtype),
    "reduce_max": lambda out, x, *, axes, **_: x.max(tuple(axes), initial=-np.inf),
    "reduce_or": lambda out, x, *, axes, **_: x.any(tuple(axes)),
    "reduce_and": lambda out, x, *, axes, **_: x.all(tuple(axes)),
    "integer_pow": lambda out, x, *, y: x**y,
    "concatenate": lambda out, *x, dimension: np.concatenate(x, dimension),
    "slice": lambda out, x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "iota": lambda out, *, dimension, **_: np.indices(out)[dimension],
    "copy": lambda out, x, **_: x,
    "copy_p": lambda out, x, **_: x,
    "stop_gradient": lambda out, x, **_: x,
    "sharding_constraint": lambda out, x, **_: x,
    "optimization_barrier": lambda out, x, **_: x,
    "tanh": lambda out, x, **_: np.tanh(x),
    "exp": lambda out, x, **_: np.exp(x),
    "log": lambda out, x, **_: np.log(x),
}

ELEMENTWISE = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "one_minus_square": lambda x: 1 - x * x,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.where(which, cases[1], cases[0]),
}
