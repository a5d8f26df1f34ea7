"""The check of a call: err(call) ≤ c · err(formula in the dtype of the call), both against float64.

c is 2 for results and 3 for derivatives. As no result can be nearer than the rounded exact one, the error of the
formula is at least the average error of rounding. It is also the largest at a few neighbours of the call, whose numbers
are moved by a unit of their last place, as at one call it may happen to be almost exact; and that with subnormal
numbers flushed to 0, as some devices do. Exceptions are failures, except those by which the library refuses a call.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from ejkernel import UnsupportedError

from .calls import Call
from .oracle import expected, of_example
from .transforms import SECOND, arguments, mesh_of, on_devices, program

NEIGHBOURS = 6


@contextlib.contextmanager
def strict():
    """No silent promotion of dtypes or ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def inside_mesh(call: Call):
    """JAX needs the mesh in a context if all operands that an Explicit axis splits are unused, as in second derivatives
    of linear functions, and if `jax.checkpoint` meets `jnp.zeros_like`, as in making a key for dropout.
    """
    wanted = call.derivative in SECOND or call.derivative.startswith("checkpoint")
    is_explicit = call.mesh is not None and call.mesh[0] == "explicit"
    return jax.set_mesh(mesh_of(call)) if wanted and is_explicit else contextlib.nullcontext()


class GpuLost(BaseException):
    """After this call every call of the process fails. Not an Exception, after which hypothesis would continue."""


LOST: list[str] = []
"""The call that met an error of CUDA, which stays with the process: no later result says anything."""


def refuse_if_lost() -> None:
    """Raises AssertionError if an earlier call of this process had a CUDA error."""
    assert not LOST, f"the GPU of this process is lost since\n{LOST[0]}"


def is_of_cuda(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is a CUDA error reported by JAX."""
    names_cuda = isinstance(error, jax.errors.JaxRuntimeError) and re.search("CUDA_ERROR_|CUDA error", str(error))
    return bool(names_cuda) or (error is not None and is_of_cuda(error.__cause__))


@dataclass
class Program:
    """A compiled call, to be run on several values."""

    call: Call
    run: Callable

    @classmethod
    def of(cls, call: Call) -> "Program":
        return cls(call.program, program(call))

    def check(self, call: Call) -> bool:
        """Whether it ran: False if the library refused it. Raises AssertionError if it is wrong."""
        assert call.program == self.call
        refuse_if_lost()
        x64 = jax.enable_x64(call.x64) if call.x64 else contextlib.nullcontext()
        with x64, strict(), on_devices(call), inside_mesh(call):
            try:
                found = jax.tree.map(np.asarray, jax.block_until_ready(self.run(*arguments(call))))
            except Exception as error:
                if is_of_cuda(error):
                    LOST.append(call.snippet)
                    raise GpuLost(f"{str(error)[:2000]}\n{call.snippet}") from error
                if may_be_refused(call) and isinstance(error, UnsupportedError) and is_clean(call.operation, error):
                    return False
                raise AssertionError(f"{type(error).__name__}: {str(error)[:2000]}\n{call.snippet}") from error
        wrong = differences(call, found)
        assert not wrong, f"{wrong}\n{call.snippet}"
        return True


def check(call: Call) -> bool:
    """Checks one call."""
    return Program.of(call).check(call)


def may_be_refused(call: Call) -> bool:
    """Whether a call may be refused: with a forced platform, or with a guarantee that no implementation gives."""
    return call.platform is not None or bool(call.options.get("batch_invariant"))


def is_clean(operation: str, error: Exception) -> bool:
    """Whether an exception is the library's own."""
    return type(error) in (ValueError, TypeError, UnsupportedError) and str(error).startswith(operation)


def differences(call: Call, found: Any) -> str:
    """What is wrong with the results; nothing where they are right."""
    found, exact, rounded = (jax.tree.map(as_numbers, of) for of in (found, *expected(call)))
    paths, tree = jax.tree.flatten_with_path(found)
    wanted, wanted_tree = jax.tree.flatten(exact)
    if tree != wanted_tree:
        return f"the results are {tree}, not {wanted_tree}"
    units = [unit(a, b, x.dtype) for (_, x), a, b in zip(paths, wanted, jax.tree.leaves(rounded), strict=True)]
    units = [a + b for a, b in zip(units, error_allowance(call, paths, wanted), strict=True)]
    said = judged(call, paths, wanted, units)
    if said:
        without = jax.tree.leaves(expected(call, flushed=True)[0])
        units = [max(a, distance(b, x)) for a, b, x in zip(units, without, wanted, strict=True)]
        said = judged(call, paths, wanted, units)
    for number in range(1, NEIGHBOURS + 1):
        if not said or "finite" in said or "shape" in said:
            break
        # The error of the formula at neighbours, and its change if only the last bits of its inputs change.
        there, roughly = (jax.tree.leaves(x) for x in expected(call, number))
        near = jax.tree.leaves(expected(call, number, eps=1e-15 if call.dtype == "float64" else 2e-7)[0])
        for i, (_, x) in enumerate(paths):
            units[i] = max(units[i], unit(there[i], roughly[i], x.dtype), distance(near[i], wanted[i]))
        said = judged(call, paths, wanted, units)
    return said


def error_allowance(call: Call, paths: list, wanted: list) -> list[float]:
    """Additional allowed errors of a result, beside that of the formula.

    These are the effect of rounding on exponentials, if the operation has a `sensitivity`, and one rounding of the
    terms of a result near 0 whose terms cancel: the formula may get 0 exactly, as in the gradient with one key. XLA on
    a CPU sums sequentially, with a rounding for each number, and NumPy pairwise: `summed` of an operation gives the
    numbers of terms.
    """
    module, examples = call.module, [of_example(call, i) for i in call.examples().ravel()]
    relative = max(module.sensitivity(call, x) for x, *_ in examples) if hasattr(module, "sensitivity") else 0.0
    sizes = [np.linalg.norm(x[np.isfinite(x)]) for x in wanted]
    allowed = [relative * size for size in sizes]
    if hasattr(module, "summed"):
        terms = [module.summed(call, path[-1].key) if isinstance(path[-1], DictKey) else 0 for path, _ in paths]
        allowed = [a + 6e-8 * np.sqrt(n) * size for a, n, size in zip(allowed, terms, sizes, strict=True)]
    if call.derivative == "none" or not hasattr(module, "magnitude"):
        return allowed
    eps = 1e-15 if call.dtype == "float64" else 1.2e-7
    terms = np.max([jax.tree.leaves(module.magnitude(call, *example)) for example in examples], axis=0)
    for i, (x, term) in enumerate(zip(wanted, terms, strict=True)):
        whole = term * np.sqrt(x.size)
        if sizes[i] < 1e-3 * whole:
            allowed[i] = 2 * max(eps, relative) * whole
    return allowed


def as_numbers(x: np.ndarray) -> np.ndarray:
    """x itself; zeros for the float0 tangents of integers."""
    return np.zeros(x.shape, np.float32) if x.dtype == jax.dtypes.float0 else x


def judged(call: Call, paths: list, wanted: list, units: list) -> str:
    said = []
    for (path, x), exact, allowed in zip(paths, wanted, units, strict=True):
        first = call.derivative == "none" or (jax.tree_util.keystr(path).startswith("[0]") and len(path) > 1)
        over = excess(x, exact, (2 if first else 3) * allowed)
        if over:
            said.append(f"{jax.tree_util.keystr(path)}: {over}")
    return "; ".join(said)


def excess(found: np.ndarray, exact: np.ndarray, allowed: float) -> str:
    """A description of what is wrong with one result, or nothing."""
    if found.shape != exact.shape:
        return f"shape {found.shape}, not {exact.shape}"
    if np.isnan(allowed):
        return ""  # the formula itself overflows
    x = found.astype(np.float64)
    kept = representable(exact, found.dtype)
    if not np.array_equal(np.isneginf(x[np.isneginf(exact)]), np.ones(np.isneginf(exact).sum(), bool)):
        return "not −∞ where the formula is: not finite"
    if not np.isfinite(x[kept]).all():
        bad = kept & ~np.isfinite(x)
        return f"not finite at {bad.sum()} of {bad.size} places, first {tuple(map(int, np.argwhere(bad)[0]))}"
    error = np.linalg.norm(x[kept] - exact[kept])
    allowed += smallest_error(found.dtype) * np.sqrt(exact.size)
    if error <= allowed:
        return ""
    size = np.linalg.norm(exact[kept])
    return f"error {error:.3e} over {allowed:.3e} where the norm is {size:.3e} ({found.dtype}{list(found.shape)})"


def unit(exact: np.ndarray, rounded: np.ndarray, dtype: Any) -> float:
    """The error of the formula, NaN if it overflows."""
    kept = representable(exact, dtype)
    if not np.isfinite(rounded[kept]).all():
        return np.nan
    inside = np.where(kept, exact, 0)
    narrow = inside.astype(dtype).astype(np.float64)
    # The average error of rounding to nearest is within a quarter of eps.
    on_average = 0.25 * float(_finfo(dtype).eps) * np.linalg.norm(inside)
    return float(max(distance(np.where(kept, rounded, 0), inside), distance(narrow, inside), on_average))


def distance(x: np.ndarray, exact: np.ndarray) -> float:
    both = np.isfinite(x) & np.isfinite(exact)
    return float(np.linalg.norm(x[both].astype(np.float64) - exact[both]))


def representable(exact: np.ndarray, dtype: Any) -> np.ndarray:
    return np.isfinite(exact) & (np.abs(exact) < 0.4 * float(_finfo(dtype).max))


def _finfo(dtype: Any) -> Any:
    """The finfo of a dtype; of float32 for integers, which are right or off by at least 1."""
    return jnp.finfo(dtype if jnp.issubdtype(dtype, jnp.floating) else np.float32)


def smallest_error(dtype: Any) -> float:
    """Errors that count as 0: below the smallest normal number times the largest factor of a product with it."""
    return 1e-290 if dtype == np.float64 else 1e-30 if dtype != np.float16 else 1e-7
