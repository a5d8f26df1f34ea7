"""Whether a call does what it must: err(call) ≤ c · err(formula in the dtype of the call), both against float64.

c is 2 for results and 3 for derivatives. No result can be nearer than the exact one rounded, which so is the least that
the formula is taken to err, and what rounding errs on average. It errs as much as at the worst of a few neighbours of
the call, whose numbers are moved by a unit of their last place, for at one call it may happen to be all but exact; and
as much as where subnormal numbers count as 0, which a device may take them for. An exception is a failure, but for
those of the library that say that an implementation does not take the call.
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
    """Neither dtypes nor ranks are promoted silently: what holds here holds elsewhere."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def inside_mesh(call: Call):
    """JAX wants it where all that an Explicit axis splits goes unused, as in second derivatives of what is linear, and
    where `jax.checkpoint` meets `jnp.zeros_like`, as in the making of a key for dropout.
    """
    wanted = call.derivative in SECOND or call.derivative.startswith("checkpoint")
    is_explicit = call.mesh is not None and call.mesh[0] == "explicit"
    return jax.set_mesh(mesh_of(call)) if wanted and is_explicit else contextlib.nullcontext()


class GpuLost(BaseException):
    """A call after which every call of this process fails. Not an Exception, which hypothesis would go on with."""


LOST: list[str] = []
"""The call that met an error of CUDA, which stays with the process: no later result says anything."""


def refuse_if_lost() -> None:
    """Raises AssertionError where an earlier call of this process met an error of CUDA."""
    assert not LOST, f"the GPU of this process is lost since\n{LOST[0]}"


def is_of_cuda(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is one of CUDA that JAX tells of."""
    names_cuda = isinstance(error, jax.errors.JaxRuntimeError) and re.search("CUDA_ERROR_|CUDA error", str(error))
    return bool(names_cuda) or (error is not None and is_of_cuda(error.__cause__))


@dataclass
class Program:
    """What is compiled for a call, to be run on several values."""

    call: Call
    run: Callable

    @classmethod
    def of(cls, call: Call) -> "Program":
        return cls(call.program, program(call))

    def check(self, call: Call) -> bool:
        """Whether it ran: False if it was refused in the library's words. Raises AssertionError where it is wrong."""
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
    """One call by itself."""
    return Program.of(call).check(call)


def may_be_refused(call: Call) -> bool:
    """Of an implementation that is asked for by name, and where none of the device can promise what is asked for."""
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
        # What the formula errs at a neighbour, and how far off it is if only the last bits of its inputs are.
        there, roughly = (jax.tree.leaves(x) for x in expected(call, number))
        near = jax.tree.leaves(expected(call, number, eps=1e-15 if call.dtype == "float64" else 2e-7)[0])
        for i, (_, x) in enumerate(paths):
            units[i] = max(units[i], unit(there[i], roughly[i], x.dtype), distance(near[i], wanted[i]))
        said = judged(call, paths, wanted, units)
    return said


def error_allowance(call: Call, paths: list, wanted: list) -> list[float]:
    """What a result may be off by beside what its formula errs.

    What rounding does to exponentials, if the operation tells of its `sensitivity`. And a rounding of its terms where
    a result is 0, or all but 0, as a sum of terms that cancel: a formula may get such a 0 exactly, where the gradient
    one key, say, is a number less itself. XLA on a CPU adds one number after the other and so rounds as often as there
    are numbers, where NumPy adds up halves: an operation may tell how many are `summed` in the gradient of an operand.
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
    """x itself; zeros for the tangent of integers, whose dtype in JAX is float0."""
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
    """What is wrong with one result."""
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
    """What the formula errs, NaN if it overflows."""
    kept = representable(exact, dtype)
    if not np.isfinite(rounded[kept]).all():
        return np.nan
    inside = np.where(kept, exact, 0)
    narrow = inside.astype(dtype).astype(np.float64)
    # Of a number that is rounded to the nearest, within a quarter of eps on average.
    on_average = 0.25 * float(_finfo(dtype).eps) * np.linalg.norm(inside)
    return float(max(distance(np.where(kept, rounded, 0), inside), distance(narrow, inside), on_average))


def distance(x: np.ndarray, exact: np.ndarray) -> float:
    both = np.isfinite(x) & np.isfinite(exact)
    return float(np.linalg.norm(x[both].astype(np.float64) - exact[both]))


def representable(exact: np.ndarray, dtype: Any) -> np.ndarray:
    return np.isfinite(exact) & (np.abs(exact) < 0.4 * float(_finfo(dtype).max))


def _finfo(dtype: Any) -> Any:
    """Of integers, which are right or off by 1 at least, that of float32."""
    return jnp.finfo(dtype if jnp.issubdtype(dtype, jnp.floating) else np.float32)


def smallest_error(dtype: Any) -> float:
    """What is as good as 0: less than the smallest normal number times what may be in a product with it."""
    return 1e-290 if dtype == np.float64 else 1e-30 if dtype != np.float16 else 1e-7
