"""The primitives that a call, its tangent and its gradient bind, for tests that compile without running."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from cases import CASES, FAMILIES, Case
from programs import equations

from ejkernel.kernels._registry import KernelSpec, kernel_registry
from ejkernel.modules._operation import OPERATIONS
from ejkernel.primitives._factory import PRIMITIVES, KernelPrimitive
from ejkernel.types import Platform, Target


@dataclass(frozen=True, eq=False)
class Bound:
    """One equation: a primitive of an operation, its operands as shapes by name, the wanted results, and the spec."""

    primitive: KernelPrimitive
    operands: Mapping[str, Any]
    results: tuple[str, ...]
    spec: Any

    def implementation(self, platform: Platform, target: Target) -> KernelSpec | None:
        """The implementation of this platform, if one takes these operands on the target."""
        operands = self.primitive.operands(self.operands)
        for entry in kernel_registry.list_implementations(self.primitive.name):
            is_of = entry.platform == platform and entry.backend == target.backend
            if is_of and entry.implementation.supports(self.spec, operands, target) is None:
                return entry
        return None

    def config(self, entry: KernelSpec, target: Target) -> Any:
        """The config of the heuristics."""
        return entry.implementation.heuristic(self.spec, self.primitive.operands(self.operands), target)

    def traced(self, entry: KernelSpec, config: Any) -> Any:
        """The implementation on these shapes, traced."""

        def run(*arrays):
            positional, extra = self.primitive.arguments(dict(zip(self.operands, arrays, strict=True)), self.results)
            return entry.implementation(*positional, **extra, spec=self.spec, config=config)

        return jax.jit(run).trace(*self.operands.values())


def written_in(platform: Platform) -> list[str]:
    """The operations that have implementations for a platform."""
    has = lambda name: any(entry.platform == platform for entry in kernel_registry.list_implementations(name))
    return [name for name in OPERATIONS if has(name)]


def bound_by(operation: str, dtypes: Sequence[Any], features: int | None = None) -> Iterator[Bound]:
    """The equations of all cases of an operation, with so many features if that is given."""
    for case in (*CASES, *FAMILIES):
        if case.operation == operation:
            sizes = {} if features is None else _sizes(case, features)
            for dtype in dtypes:
                yield from bound(case, dtype, **sizes)


def _sizes(case: Case, features: int) -> dict[str, int]:
    """Sizes with so many features: d and e, or k and n of matrices, or c of latents and the sum of two parts.

    Of TurboQuant's pools also the bytes that indices and signs have.
    """
    if case.operation == "multi_latent_page_attention":
        return dict(c=features, f=features + case.sizes["d"])
    if case.operation.endswith("_turboquant"):
        return dict(d=features, f=features, i=features // 2, e=features, w=features // 8)
    letters = {"d", "e"} if "d" in case.sizes else {"k", "n"}
    sizes = dict.fromkeys(letters & case.sizes.keys(), features)
    return sizes | dict(x=features - case.sizes["y"]) if case.operation == "flash_mla" else sizes


@functools.cache
def bound(case: Case, dtype: Any, **sizes: int) -> tuple[Bound, ...]:
    """Each equation of a case with these sizes once, in the order of first use; no target is known, nor needed."""
    case, found = case.resized(sizes), []
    arrays = case.arrays(dtype=dtype)
    moving = {name: arrays[name] for name in case.differentiable}
    call = lambda moved: case.call({**arrays, **moved})
    tangent = lambda moved, change: jax.jvp(call, (moved,), (change,))
    gradient = lambda moved, seeds: jax.vjp(call, moved)[1](seeds)
    programs = [jax.make_jaxpr(call)(moving)]
    if moving:
        programs.append(jax.make_jaxpr(tangent)(moving, moving))
        programs.append(jax.make_jaxpr(gradient)(moving, jax.eval_shape(call, moving)))
    seen = set()
    for equation in (e for program in programs for e in equations(program, case.operation)):
        name, params = equation.primitive.name, equation.params
        if (name, params["operands"], params["results"]) in seen:
            continue
        seen.add((name, params["operands"], params["results"]))
        avals = (jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars)
        operands = dict(zip(params["operands"], avals, strict=True))
        found.append(Bound(PRIMITIVES[name], operands, params["results"], params["spec"]))
    return tuple(found)
