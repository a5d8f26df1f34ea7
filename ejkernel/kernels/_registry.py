"""The registry of kernel implementations by algorithm, platform and backend.

    @kernel_registry.register("flash_attention", Platform.TRITON, Backend.GPU, priority=10)
    @supported_if(lambda spec, operands, target: "head dim over 256" if operands.q.shape[-1] > 256 else None)
    def flash_attention(q, k, v, *, spec, config): ...

    kernel_registry.get("flash_attention", platform="triton")(q, k, v, causal=True)     # as ejkernel.modules has it
    kernel_registry.find("flash_attention", platform="triton").implementation(q, k, v, spec=spec, config=config)

Several implementations of one algorithm live side by side; of those that match a query, the one with the highest
priority is taken, and among equals the one that was registered first.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax

from ejkernel.types import Backend, Platform

from ._checked import checked, config_refusal
from ._signatures import mismatches, parameters

__all__ = [
    "Backend",
    "F",
    "KernelRegistry",
    "KernelSpec",
    "Platform",
    "config_refusal",
    "configured_by",
    "emits",
    "kernel_registry",
    "supported_if",
]

F = TypeVar("F", bound=Callable)

PlatformName = Literal["triton", "pallas", "cuda", "cute", "xla"]
BackendName = Literal["gpu", "tpu", "cpu", "any"]


@dataclass(frozen=True)
class KernelSpec:
    """One registered implementation.

    Attributes:
        platform: the framework that it is written in.
        backend: the hardware it runs on.
        algorithm: the algorithm's name, in lower case.
        implementation: the callable; its `supports(spec, operands, target)` says why it cannot run, or None.
        priority: of several that match, the highest is taken.
    """

    platform: Platform
    backend: Backend
    algorithm: str
    implementation: Callable
    priority: int = 0


def supported_if(predicate: Callable[[Any, Any, Any], str | None]) -> Callable[[F], F]:
    """Attaches `predicate(spec, operands, target)` to an implementation as `.supports`: why it cannot run, or None."""

    def attach(implementation: F) -> F:
        implementation.supports = predicate
        return implementation

    return attach


def configured_by(
    heuristic: Callable[[Any, Any, Any], Any],
    space: Callable[[Any, Any, Any], list],
    variants: tuple[str, ...] = (),
    refuses: Callable[[Any], str | None] = lambda config: None,
) -> Callable[[F], F]:
    """Attaches `heuristic(spec, operands, target)`, the config without timing, and `space(…)`, those worth timing.

    `variants` is what the config may name as its `algorithm`, and `refuses(config)` says what else is wrong with one:
    either is a `ValueError` when it runs.
    """

    def attach(implementation: F) -> F:
        implementation.heuristic, implementation.space, implementation.variants = heuristic, space, variants
        implementation.refuses = refuses
        return implementation

    return attach


def emits(*custom_calls: str) -> Callable[[F], F]:
    """Attaches the names of the custom calls that an implementation is lowered to and `jax.export` does not know."""

    def attach(implementation: F) -> F:
        implementation.custom_calls = custom_calls
        return implementation

    return attach


class KernelRegistry:
    """Implementations by algorithm, each list in the order of descending priority. Names are case-insensitive."""

    def __init__(self):
        self._registry: dict[str, list[KernelSpec]] = {}
        self._operations: dict[str, Callable[..., Any]] = {}

    def register(
        self, algorithm: str, platform: Platform | PlatformName, backend: Backend | BackendName, priority: int = 0
    ) -> Callable[[F], F]:
        """Decorator: registers a function as an implementation of `algorithm`.

        What it returns, and what is registered, is the function with its signature, behind some checks. A keyword that
        it does not take is a `TypeError` which names the algorithm, the platform, the keyword and those it takes. A
        config whose fields make no sense, or not to this implementation, is a `ValueError` or `TypeError`. And
        a failure of the machinery below (`jax.errors.JaxRuntimeError`, any error of Triton or of MLIR) becomes an
        `EjkernelRuntimeError` with the cause attached. Every other exception passes as it is: what a caller did wrong
        (`ValueError`, `TypeError`), what is not supported (`NotImplementedError`), and the errors of tracing.
        """
        platform, backend, name = Platform(platform), Backend(backend), algorithm.lower()

        def register(implementation: F) -> F:
            found = checked(implementation, name, platform)
            specs = [*self._registry.get(name, ()), KernelSpec(platform, backend, name, found, priority)]
            self._registry[name] = sorted(specs, key=lambda spec: -spec.priority)
            return found

        return register

    def register_operation(self, algorithm: str, operation: Callable[..., Any]) -> None:
        """Makes `get` give `operation`, called with `platform=` and the documented arguments, for an algorithm.

        For one without implementations, a composed operation, `get` names it in its error.
        """
        self._operations[algorithm.lower()] = operation

    def get(
        self,
        algorithm: str,
        platform: Platform | PlatformName | Literal["auto"] | None = None,
        backend: Backend | BackendName | None = None,
    ) -> Callable:
        """What computes an algorithm: a function of the arguments that are documented for it.

        For an operation of the library that is the one in `ejkernel.modules`, on the platform if one is asked for; for
        any other algorithm the implementation that `find` gives, as it was registered. An operation that is asked for
        on another backend than that of this process refuses a call that would run here; what only runs there is traced.

        Raises:
            ValueError: nothing matches, or there is no such platform or backend.
        """
        found = self.find(algorithm, platform, backend)
        if (operation := self._operations.get(found.algorithm)) is None:
            return found.implementation
        asked = None if platform in (None, "auto") else found.platform
        given = functools.partial(operation, platform=asked)
        if backend not in (None, Backend.ANY):
            taking = [s.backend for s in self.list_implementations(algorithm) if asked in (None, s.platform)]
            given = functools.partial(_on_backend, Backend(backend), taking, given)
        return functools.update_wrapper(given, operation)

    def find(
        self,
        algorithm: str,
        platform: Platform | PlatformName | Literal["auto"] | None = None,
        backend: Backend | BackendName | None = None,
    ) -> KernelSpec:
        """The implementation of highest priority that matches.

        An omitted platform or backend matches all; implementations for `Backend.ANY` match every backend (so a query
        for XLA falls back to them by itself). A query for `Backend.ANY` that finds none of these asks again for
        `jax.default_backend()`; `platform="auto"` asks for that from the start, in any platform.

        Raises:
            ValueError: nothing matches, or there is no such platform or backend.
        """
        wanted = None if platform in (None, "auto") else Platform(platform)
        if platform == "auto" and backend in (None, Backend.ANY):
            backend = jax.default_backend()
        elif backend is not None:
            backend = Backend(backend)
        specs = self.list_implementations(algorithm)
        for spec in specs:
            if wanted in (None, spec.platform) and (backend is None or spec.backend in (Backend.ANY, backend)):
                return spec
        if backend == Backend.ANY:
            return self.find(algorithm, platform, jax.default_backend())
        if not specs and (operation := self._operations.get(algorithm.lower())) is not None:
            raise ValueError(
                f"{algorithm} is composed of other operations and has no implementation of its own; call "
                f"{operation.__module__}.{operation.__name__}"
            )
        registered = ", ".join(f"{spec.platform}/{spec.backend}" for spec in specs) or "nothing"
        raise ValueError(
            f"{algorithm}: no implementation for platform {platform} and backend {backend}; registered: {registered}"
        )

    def list_algorithms(self) -> list[str]:
        """The registered algorithms, sorted."""
        return sorted(self._registry)

    def list_implementations(self, algorithm: str) -> list[KernelSpec]:
        """A copy of the implementations of an algorithm by descending priority; empty if there is no such algorithm."""
        return list(self._registry.get(algorithm.lower(), ()))

    def validate_signatures(self, algorithm: str | None, verbose: bool = False) -> bool | None:
        """Whether all implementations take the same parameters: names in order, kinds, defaults, annotations.

        The implementation of highest priority is the reference; each departure from it is a `UserWarning`. Given None,
        validates every algorithm and returns None. With `verbose`, prints the parameters of every implementation.

        Raises:
            ValueError: there is no such algorithm.
        """
        if algorithm is None:
            for name in self.list_algorithms():
                self.validate_signatures(name, verbose)
            return None
        specs = self.list_implementations(algorithm)
        if not specs:
            raise ValueError(f"{algorithm}: no such algorithm is registered")
        if verbose:
            for spec in specs:
                print(f"{spec.algorithm} {spec.platform}/{spec.backend}")
                print(*(f"    {p.kind.description}: {p}" for p in parameters(spec.implementation)), sep="\n")
        mismatches = [mismatch for other in specs[1:] for mismatch in _differences(specs[0], other)]
        for mismatch in mismatches:
            warnings.warn(mismatch, UserWarning, stacklevel=2)
        return not mismatches


kernel_registry = KernelRegistry()
"""The registry that every implementation of the library is in."""


def _on_backend(
    backend: Backend, taking: list[Backend], operation: functools.partial, *args: Any, **kwargs: Any
) -> Any:
    """The result of an operation that was asked for on a backend, if its implementations run on those of `taking`."""
    if (here := jax.default_backend()) != backend and not {here, Backend.ANY}.isdisjoint(taking):
        raise ValueError(
            f"{operation.func.__name__}: asked for on backend {backend}, and this process computes on {here}; for a "
            "program that is lowered for another device, ask without a backend"
        )
    return operation(*args, **kwargs)


def _differences(reference: KernelSpec, other: KernelSpec) -> list[str]:
    of, to = f"{other.algorithm}: {other.platform}/{other.backend}", f"{reference.platform}/{reference.backend}"
    return mismatches(reference.implementation, other.implementation, to, of)
