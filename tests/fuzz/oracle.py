"""The results of a call in float64, and those of its formula in the dtype of the call."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import linear_call

from .calls import Call
from .numpy_backend import traced
from .operations import BY_NAME
from .operations._draws import shape_of
from .transforms import DERIVATIVES, SAME, SECOND, stacked


def moving(call: Call, x: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The float operands and the quantised ones, with 0 instead of −∞ if the facts have its places."""
    floats = {n: a for n, a in x.items() if jnp.issubdtype(a.dtype, jnp.floating) or a.dtype == np.int8}
    wide = {n: a.astype(np.float64) for n, a in floats.items()}
    return {n: np.where(np.isneginf(a), 0, a) if n in ("bias", "sinks") else a for n, a in wide.items()}


@dataclass(frozen=True)
class Rounding:
    """The rounding of numbers in a formula to the dtype of a call: `rounded(a)`. None without a dtype.

    Attributes:
        dtype: the dtype to which numbers are rounded.
        second: whether a second derivative is taken.
    """

    dtype: Any = None
    second: bool = False

    def __call__(self, a):
        return a if self.dtype is None else a.astype(self.dtype).astype(a.dtype)

    def cotangent(self, a):
        """a itself, whose cotangent is rounded. The derivative of that rounding is another: so are second tangents."""
        if self.dtype is None:
            return a
        if self.second:
            return self(a) + jax.lax.stop_gradient(a - self(a))
        return linear_call(lambda _, a: a, lambda _, of_a: self(of_a), (), a)


@functools.lru_cache(256)
def _compiled(operation: str, options: tuple, derivative: str, wrt: tuple, dtype: str):
    """(floats, facts, cotangents, tangents), all wide -> results in float64, and rounded on the way."""
    formula = BY_NAME[operation].formula
    narrow = jnp.dtype(dtype)
    wide = np.promote_types(narrow, np.float32)

    def run(facts, *args):
        def of(args, rounded):
            f = lambda x: formula(x, facts, dict(options), rounded)
            return DERIVATIVES[derivative](f, wrt)(*args)

        exact = of(args, Rounding())
        args = jax.tree.map(lambda a: a.astype(wide), args)
        return exact, of(args, Rounding(narrow, derivative in SECOND))

    return traced(run)


def expected(call: Call, neighbour: int = 0, eps: float | None = None, flushed: bool = False) -> tuple[Any, Any]:
    """(exact, rounded) results of all examples, stacked as the call stacks them; of the call whose numbers are moved
    by up to one unit of their last place, or by eps, for another neighbour than 0, or whose subnormal ones are 0.
    """
    options = tuple((n, x) for n, x in call.options.items() if n != "config")
    derivative = SAME.get(call.derivative, call.derivative)
    run = _compiled(call.operation, options, derivative, call.wrt, call.dtype)
    examples = call.examples()
    rng = np.random.default_rng(neighbour) if neighbour else None
    both = np.empty(examples.shape, object), np.empty(examples.shape, object)
    with jax.enable_x64(True):
        for at in np.ndindex(*examples.shape):
            x, u, t = of_example(call, examples[at], flushed)
            facts = call.module.facts(call, x)
            args = moved(call, (moving(call, x), u, t), neighbour, eps)
            for part, found in zip(both, run(facts, *args, rng=rng), strict=True):
                part[at] = jax.tree.map(np.asarray, found)
    return _joined(call, both[0]), _joined(call, both[1], _in_its_dtype)


def of_example(call: Call, example: tuple[int, ...], flushed: bool = False) -> tuple:
    """Arrays, and wide cotangents and tangents; with 0 instead of subnormal numbers if these are `flushed`."""
    kept = without_subnormals if flushed else lambda a: a
    x = {name: kept(a) for name, a in call.arrays(example).items()}
    if call.derivative == "none":
        return x, None, None
    types = [jax.ShapeDtypeStruct(shape_of(call, axes), dtype) for axes, dtype in call.module.results(call)]
    u = call.directions("cotangents", dict(enumerate(types)), example).values()
    t = call.directions("tangents", {n: x[n] for n in call.wrt}, example)
    return x, [kept(a).astype(np.float64) for a in u], {n: kept(a).astype(np.float64) for n, a in t.items()}


def without_subnormals(a: np.ndarray) -> np.ndarray:
    """The array as on a device that flushes subnormal numbers to 0."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a
    return np.where(np.abs(a.astype(np.float64)) < float(jnp.finfo(a.dtype).smallest_normal), 0, a).astype(a.dtype)


def moved(call: Call, args: Any, neighbour: int, eps: float | None) -> Any:
    """The numbers of a neighbour of the call."""
    if neighbour == 0:
        return args
    rng = np.random.default_rng(neighbour)
    eps = float(jnp.finfo(call.dtype).eps) if eps is None else eps

    def near(a):
        there = np.asarray(a * (1 + eps * rng.integers(-1, 2, a.shape)))
        return there if eps < 1e-6 else there.astype(call.dtype).astype(np.float64)

    return jax.tree.map(near, args)


def _joined(call: Call, parts: np.ndarray, rounded: Callable = lambda call, name, gradient: gradient) -> Any:
    """Stacked; a gradient that is taken outside of the maps is summed over those that do not map its operand, rounded
    before it is: each example has the gradient of its own operand, which is one of the dtype of that.
    """
    whole = stacked(parts)
    if not call.outside or call.derivative == "none":
        return whole
    gathered = lambda of: {n: _gathered(call, n, rounded(call, n, a)) for n, a in of.items()}
    if SAME.get(call.derivative, call.derivative) == "vjp":
        return whole[0], gathered(whole[1])
    if SAME.get(call.derivative, call.derivative) == "jvp_of_vjp":
        return gathered(whole)
    return whole


def _in_its_dtype(call: Call, name: str, gradient: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gradient.astype(call.type(name)).astype(np.float64)


def _gathered(call: Call, name: str, gradient: np.ndarray) -> np.ndarray:
    """From [outer, inner, …] to where the operand has these axes: summed over the maps that it has no axis of."""
    levels = len(call.maps)
    mapped = [level for level in range(levels) if call.is_mapped(name, level)]
    with np.errstate(invalid="ignore"):  # of a formula that overflows
        gradient = gradient.sum(tuple(levels - 1 - level for level in range(levels) if level not in mapped))
    order = list(range(len(mapped), gradient.ndim))
    for place, level in enumerate(mapped):  # the inner one first, as the axes were made
        axis = call.axis(name, level)
        order.insert(len(order) if axis == -1 else axis, len(mapped) - 1 - place)
    return gradient.transpose(order)
