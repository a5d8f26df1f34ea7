"""The kernels of an algorithm on one platform: a forward, a tangent and a backward, imported when first needed.

    _kernels = KernelTrio(__name__, "flash_attention", FlashAttentionSpec, Operands, Outputs, …, Backend.GPU, 100)

    flash_attention = _kernels.forward("forward", supports)
    flash_attention_jvp = _kernels.tangent("tangent", supports)
    flash_attention_bwd = _kernels.backward("backward", supports_bwd)

    _kernels.register("flash_attention", flash_attention, flash_attention_jvp, flash_attention_bwd)

The package has a module for each of the three with a function of that name, and `configs` with
`space(name, operands, spec, target)`: the configs that may be best for a call, the likeliest first. A config may
name one of the `variants` that are given with a kernel as its algorithm. What was measured of a kernel holds until its
module, `configs`, or something that these import changes.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax import Array

from ejkernel.types import Backend, KernelConfig, OperationConfig, Platform, Target

from ._registry import configured_by, emits, kernel_registry, supported_if

Predicate = Callable[[Any, Any, Target], str | None]


@dataclass(frozen=True)
class KernelTrio:
    """Names the modules of the three kernels, their types, and how they are registered.

    Attributes:
        package: the name of the package.
        algorithm: the name of the forward; the others are called `<algorithm>_jvp` and `<algorithm>_bwd`.
        spec, operands, outputs: the types that the trio of primitives defines.
        platform: what the kernels are written in.
        backend: the hardware that they run on.
        priority: of several implementations that support a call, the one with the highest priority is chosen.
        config: the type of the configs.
        custom_calls: the custom calls in their lowering that `jax.export` does not know.
        refuses: (name of a kernel, config) → why the kernel does not take the config, or None.
        excess: as `refuses` for given operands, which may exceed a limit such as shared memory; gets the package too.
    """

    package: str
    algorithm: str
    spec: type
    operands: type
    outputs: type
    platform: Platform
    backend: Backend
    priority: int
    config: type[OperationConfig] = KernelConfig
    custom_calls: tuple[str, ...] = ()
    refuses: Callable[[str, OperationConfig], str | None] = lambda name, config: None
    excess: Callable[[str, str, Any, OperationConfig], str | None] = lambda package, name, operands, config: None

    def forward(self, module: str, supports: Predicate, variants: tuple[str, ...] = ()) -> Callable[..., Any]:
        """(*operands, spec, config) → outputs."""
        Spec, Outputs, Config = self.spec, self.outputs, self.config

        def forward(*operands: Array | None, spec: Spec = Spec(), config: Config = Config()) -> Outputs:
            self._check("", self.operands(*operands), config)
            return self._function(module, "")(*operands, spec=spec, config=config)

        return self._presented(forward, module, "", supports, variants)

    def tangent(self, module: str, supports: Predicate, variants: tuple[str, ...] = ()) -> Callable[..., Any]:
        """(primals, outputs, tangents, spec, config) → the tangents of the outputs; a tangent of None is zero."""
        Spec, Operands, Outputs, Config = self.spec, self.operands, self.outputs, self.config

        def tangent(
            primals: Operands,
            outputs: Outputs,
            tangents: Operands,
            *,
            spec: Spec = Spec(),
            config: Config = Config(),
        ) -> Outputs:
            self._check("_jvp", primals, config)
            return self._function(module, "_jvp")(primals, outputs, tangents, spec=spec, config=config)

        return self._presented(tangent, module, "_jvp", supports, variants)

    def backward(self, module: str, supports: Predicate, variants: tuple[str, ...] = ()) -> Callable[..., Any]:
        """(primals, outputs, cotangents, wrt, spec, config) → the cotangents of the operands that wrt names."""
        Spec, Operands, Outputs, Config = self.spec, self.operands, self.outputs, self.config

        def backward(
            primals: Operands,
            outputs: Outputs,
            cotangents: Outputs,
            *,
            wrt: tuple[str, ...],
            spec: Spec = Spec(),
            config: Config = Config(),
        ) -> tuple[Array, ...]:
            self._check("_bwd", primals, config)
            return self._function(module, "_bwd")(primals, outputs, cotangents, wrt=wrt, spec=spec, config=config)

        return self._presented(backward, module, "_bwd", supports, variants)

    def register(self, operation: str, *implementations: Callable[..., Any]) -> None:
        """Registers the implementations for an operation, which is the algorithm or one of its family."""
        for implementation in implementations:
            name = operation + implementation.__name__.removeprefix(self.algorithm)
            kernel_registry.register(name, self.platform, self.backend, self.priority)(implementation)

    def _check(self, suffix: str, operands: Any, config: OperationConfig) -> None:
        name = self.algorithm + suffix
        if wrong := self.excess(self.package, name, operands, config):
            raise ValueError(f"{name} ({self.platform}): {wrong}")

    def _function(self, module: str, suffix: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{self.package}.{module}"), self.algorithm + suffix)

    def _presented(
        self, implementation: Callable[..., Any], module: str, suffix: str, supports: Predicate, variants: tuple
    ) -> Callable[..., Any]:
        name = self.algorithm + suffix
        implementation.__module__, implementation.__name__, implementation.__qualname__ = self.package, name, name
        implementation.modules = (module, "configs")

        def space(spec: Any, operands: Any, target: Target) -> list[OperationConfig]:
            configs = importlib.import_module(f"{self.package}.configs")
            return configs.space(name, operands, spec, target)

        configured = configured_by(lambda *call: space(*call)[0], space, variants, partial(self.refuses, name))
        implementation.excess = partial(self.excess, self.package, name)
        return emits(*self.custom_calls)(configured(supported_if(supports)(implementation)))
