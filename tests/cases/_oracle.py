"""The oracle: the formula in float64, differentiated by JAX, and the tolerance of results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._case import Case

# --- Derivatives of f: arrays by name -> list of results; the same functions for an operation and for its formula -----


def gradient(f: Callable, wrt: Sequence[str]) -> Callable:
    """(arrays, cotangents) -> Jᵀ·cotangents."""
    return lambda arrays, cotangents: pullback(f, wrt)(arrays, cotangents)[1]


def pullback(f: Callable, wrt: Sequence[str]) -> Callable:
    """(arrays, cotangents) -> (results, Jᵀ·cotangents), for programs that need the results too."""

    def run(arrays, cotangents):
        results, pull = jax.vjp(lambda moving: f({**arrays, **moving}), {name: arrays[name] for name in wrt})
        return results, pull(cotangents)[0]

    return run


def tangent(f: Callable, wrt: Sequence[str]) -> Callable:
    """(arrays, tangents) -> (results, J·tangents)."""

    def run(arrays, tangents):
        moving, tangents = ({name: x[name] for name in wrt} for x in (arrays, tangents))
        return jax.jvp(lambda moving: f({**arrays, **moving}), (moving,), (tangents,))

    return run


def curvature(f: Callable, wrt: Sequence[str]) -> Callable:
    """(arrays, cotangents, tangents) -> the derivative of Jᵀ·cotangents along the tangents: forward over reverse."""

    def run(arrays, cotangents, tangents):
        return tangent(lambda arrays: gradient(f, wrt)(arrays, cotangents), wrt)(arrays, tangents)[1]

    return run


def curvature_by_reverse(f: Callable, wrt: Sequence[str]) -> Callable:
    """The same by reverse over reverse: second derivatives commute."""

    def run(arrays, cotangents, tangents):
        tangents = {name: tangents[name] for name in wrt}
        return gradient(lambda arrays: gradient(f, wrt)(arrays, cotangents), wrt)(arrays, tangents)

    return run


# --- The oracle -------------------------------------------------------------------------------------------------------


def oracle(case: Case, transform: Callable | None = None, wrt: tuple[str, ...] | None = None) -> Callable[..., Any]:
    """The formula of a case, or a transform of it, on the same arrays in float64."""
    return in_float64(jitted(case, Case.formula, transform, wrt))


_jitted: dict[Any, Callable] = {}


def jitted(
    case: Case, of: Callable, transform: Callable | None = None, wrt: tuple[str, ...] | None = None
) -> Callable[..., Any]:
    """`Case.call` or `Case.formula` of a case, or a transform of it, compiled once for all of the same program."""
    key = case.program, of, transform, wrt
    if key not in _jitted:
        f = functools.partial(of, case)
        _jitted[key] = jax.jit(f if transform is None else transform(f, wrt or case.differentiable))
    return _jitted[key]


def in_float64(f: Callable[..., Any]) -> Callable[..., Any]:
    """f with every float argument converted to float64."""

    def run(*args):
        with jax.enable_x64(True):
            results = jax.tree.map(np.asarray, f(*jax.tree.map(_widened, args)))
        assert not any(np.isnan(x).any() for x in jax.tree.leaves(results)), "the oracle gives NaN"
        return results

    return run


def _widened(x: Any) -> Any:
    return np.asarray(x).astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Checks that structure, shapes and non-finite entries are equal, and errors at most `tolerance` of the largest."""
    paths, tree = jax.tree.flatten_with_path(found)
    wanted, wanted_tree = jax.tree.flatten(wanted)
    assert tree == wanted_tree, what
    for (path, a), b in zip(paths, wanted, strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, where
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=where)
        a, b = a[finite], b[finite]
        error, size = np.abs(a - b).max(initial=0), np.abs(b).max(initial=0)
        assert error <= tolerance * max(size, 1e-2), f"{where}: error {error:.2e} where the largest value is {size:.2e}"
