"""Checks the example call of an operation, forward and gradient, on every implementation that supports it.

The reference is the formula in float64: the error of an implementation may be 2 times that of the formula in the dtypes
of the call, and 3 times in a gradient. The unit is at least that of rounding the exact result to the dtype of products
of matrices, which a state of float32 may be a sum of.
"""

import importlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels._dispatch import Candidate, candidates
from ..kernels._registry import KernelSpec
from ..modules._operation import OPERATIONS, types_of_call
from ..modules._primitive_kernel import KERNELS, PrimitiveKernel
from ..ops import benchmark
from ..primitives._factory import COTANGENT
from ..primitives._forward_only import ForwardOnly
from ..primitives._trio import Trio
from ..types import Target

PASSES = {"forward": 2.0, "gradient": 3.0}
"""The checked passes of an operation, and how many times the formula's error each may have."""

# Of formulas on a CPU, which run once.
_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Named = Mapping[str, Any]
Program = Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one pass on one implementation.

    Attributes:
        milliseconds: of a call, if its numbers are right.
        error: of its numbers, in units of that of the formula.
        reason: why it does not take the call.
        trouble: what is wrong with its result, or the error that it raised.
    """

    milliseconds: float | None = None
    error: float | None = None
    reason: str = ""
    trouble: str = ""


class Check:
    """The example call of an operation for a target, of which this process has a device."""

    def __init__(self, operation: str, target: Target) -> None:
        self.operation, self.target = operation, target
        self._programs: dict[tuple[str, str], Program | Exception] = {}

    @property
    def algorithm(self) -> Trio | ForwardOnly:
        return OPERATIONS[self.operation].algorithm

    @property
    def kernels(self) -> dict[str, PrimitiveKernel]:
        """The kernel object of each pass."""
        primitives = {"forward": self.algorithm.forward}
        if self.algorithm.differentiable:
            primitives["gradient"] = self.algorithm.backward
        return {name: KERNELS[primitive.name] for name, primitive in primitives.items()}

    @cached_property
    def types(self) -> tuple[Named, Any]:
        """The operands by name, as their types, and the spec."""
        return types_of_call(self.operation, **OPERATIONS[self.operation].example())

    @cached_property
    def candidates(self) -> dict[str, Sequence[Candidate]]:
        """Of each pass, its implementations and the reasons against them."""
        named, spec = self.types
        return {
            name: candidates(kernel.name, spec, kernel.primitive.operands(named), self.target)
            for name, kernel in self.kernels.items()
        }

    def prepare(self) -> None:
        """Computes the formulas and compiles the implementations. `outcome` reports errors, or raises them again."""
        with suppress(Exception):
            self._prepare()

    def _prepare(self) -> None:
        for name, found in self.candidates.items():
            for entry, reason in found:
                if reason is None and not self._hidden(name, entry):
                    try:
                        self._programs[name, place(entry)] = self._compiled(name, str(entry.platform))
                    except Exception as error:
                        self._programs[name, place(entry)] = error

    def outcome(self, name: str, candidate: Candidate) -> Outcome:
        """Runs and judges one pass on one implementation."""
        entry, reason = candidate
        if reason := reason or self._hidden(name, entry):
            return Outcome(reason=" ".join(reason.split()))
        try:
            program = self._programs[name, place(entry)]
            if isinstance(program, Exception):
                raise program
            error = _error(
                jax.tree.map(np.asarray, program()), *(of[name] for of in self.formulas), self.products_dtype
            )
            if not error <= PASSES[name]:
                return Outcome(error=error, trouble=f"wrong, over {PASSES[name]:g} times the error of the formula")
            return Outcome(benchmark(program, num_warmup=1, num_iters=5), error)
        except Exception as error:  # whatever a kernel raises, the others are still checked
            return Outcome(trouble=f"fails with {type(error).__name__}: {first_line(error)}")

    # --- The operands and expected results of the call

    @cached_property
    def operands(self) -> Named:
        """Normal numbers, with lengths, tables and decays as the operation's `synthetic_operands` makes them."""
        named, spec = self.types
        return OPERATIONS[self.operation].synthetic_operands(
            {name: _filled(x, name) for name, x in named.items()}, spec
        )

    @cached_property
    def cotangents(self) -> Named:
        """Normal numbers for each result."""
        shapes = self.algorithm.forward.result_shapes(self.operands, self.algorithm.outputs._fields, self.types[1])
        return {name: _filled(jax.ShapeDtypeStruct(*of), name) for name, of in shapes.items()}

    @cached_property
    def differentiable(self) -> Sequence[str]:
        named = self.operands
        return [name for name in self.algorithm.differentiable if name in named and _is_float(named[name])]

    @cached_property
    def products_dtype(self) -> Any:
        """The dtype of fewest bits, but at least 16, of the operands: that of products of matrices."""
        found = [x.dtype for x in self.operands.values() if _is_float(x) and x.dtype.itemsize > 1]
        return min(found, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))

    @cached_property
    def formulas(self) -> tuple[dict[str, Named], dict[str, Named]]:
        """The results of each pass by the formula, in float64 and in the dtypes of the call."""
        reference = importlib.import_module(f"ejkernel.kernels._xla.{self.operation}").reference
        algorithm, spec = self.algorithm, self.types[1]

        def both(operands, cotangents):
            moving = {name: operands[name] for name in self.differentiable}
            of = lambda moving: reference(*algorithm.operands(**{**operands, **moving}), spec=spec)._asdict()
            outputs, pull = jax.vjp(of, moving)
            return {"forward": outputs, "gradient": pull(cotangents)[0]}

        given = jax.tree.map(np.asarray, (self.operands, self.cotangents))
        host = _host()
        program = jax.jit(both, compiler_options=_UNOPTIMIZED if host else None)
        with jax.default_device(host):
            rounded = jax.tree.map(np.asarray, program(*given))
            with jax.enable_x64(True):
                exact = jax.tree.map(np.asarray, program(*jax.tree.map(_widened, given)))
        return exact, rounded

    def _compiled(self, name: str, platform: str) -> Program:
        kernel, spec, named, results = self.kernels[name], self.types[1], self.operands, self.algorithm.outputs._fields
        if name == "gradient":
            outputs = {of: jnp.asarray(self.formulas[1]["forward"][of]) for of in self.algorithm.residuals}
            cotangents = {of + COTANGENT: x for of, x in self.cotangents.items()}
            named, results = {**named, **outputs, **cotangents}, [of + COTANGENT for of in self.differentiable]
        inv = replace(kernel.invocation(named, spec, results, platform), target=self.target)
        config = kernel.heuristic_cfg(inv)
        program = jax.jit(lambda *arrays: kernel.bind(arrays, inv.kwargs, config)).lower(*inv.args).compile()
        return lambda: {of.removesuffix(COTANGENT): x for of, x in program(*inv.args).items()}

    def _hidden(self, name: str, entry: KernelSpec) -> str | None:
        """Why an implementation that supports the call is never chosen, even by its platform; None if it can be."""
        for other, reason in self.candidates[name]:
            if other is entry:
                return None
            if reason is None and other.platform == entry.platform:
                return f"{place(other)} of priority {other.priority} takes the call first"


def prepare(checks: Sequence[Check]) -> None:
    """Prepares checks in threads: most of the time is spent in compilers."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Check.prepare, checks))


def first_line(error: Exception) -> str:
    """The first line of its message, of at most 160 characters."""
    return next(iter(str(error).strip().splitlines()), "")[:160]


def place(entry: KernelSpec) -> str:
    """Platform and backend of an implementation, as in "triton/gpu"."""
    return f"{entry.platform}/{entry.backend}"


def _host() -> jax.Device | None:
    """The device that computes formulas: a CPU, or None, the default device, if JAX may not use one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _widened(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if _is_float(x) else x


def _filled(x: Any, name: str) -> Any:
    """Values by numpy: compiling a program of JAX for each array would take longer than the whole check."""
    if _is_float(x):
        return jnp.asarray(np.random.default_rng(zlib.crc32(name.encode())).standard_normal(x.shape), x.dtype)
    return (
        jnp.zeros(x.shape, x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else jax.ShapeDtypeStruct(x.shape, x.dtype)
    )


def _error(found: Named, exact: Named, formula: Named, dtype: Any) -> float:
    """The largest error of a result, as a norm in units of that of the formula; infinite if a result is not finite.

    The unit is at least that of rounding the exact result to `dtype`, and what is expected of that: the rounding errors
    of a few numbers may be small by chance.
    """
    worst = 0.0
    for name, x in found.items():
        finite = np.isfinite(exact[name])
        rounded = exact[name].astype(dtype if _is_float(x) else x.dtype)
        if not np.array_equal(x[~finite].astype(np.float64), exact[name][~finite]):
            return np.inf
        error, of_formula, of_rounding = (
            np.linalg.norm(of[finite].astype(np.float64) - exact[name][finite]) for of in (x, formula[name], rounded)
        )
        if of_rounding:
            of_rounding = max(of_rounding, _expected_rounding(exact[name][finite], rounded.dtype))
        unit = max(of_formula, of_rounding)
        if not np.isfinite(error) or error > 0 == unit:
            return np.inf
        worst = max(worst, error / unit if unit else 0.0)
    return float(worst)


def _expected_rounding(x: np.ndarray, dtype: Any) -> float:
    """The norm of errors that are uniform between ±½ unit in the last place, as those of rounding to a dtype."""
    _, exponent = np.frexp(x)
    return float(np.linalg.norm(np.ldexp(np.where(x == 0, 0.0, 0.5), exponent)) * jnp.finfo(dtype).eps / np.sqrt(12))
