"""Common parts of the modules: their config, platform detection, and the deprecated `create_default_executor`."""

import warnings
from typing import Any

import jax

from ejkernel.kernels._dispatch import candidates
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, PersistentCache, Tuner
from ejkernel.ops.utils.devices import device_target
from ejkernel.types import KernelConfig

from ._operation import types_of_call
from ._primitive_kernel import KERNELS, PrimitiveKernel

__all__ = ["KernelConfig", "create_default_executor", "detect_platform"]

_PREFERENCE = {
    "gpu": (Platform.TRITON, Platform.XLA),
    "tpu": (Platform.PALLAS, Platform.XLA),
}


def detect_platform(algorithm: str, platform: Platform | str | None = "auto", maybe_pallas: bool = False) -> Platform:
    """The platform on which `algorithm` runs on the default backend.

    For the primitives of an operation this is the platform of the implementation that a small call runs with, as
    `ejkernel.explain` names it; but on a GPU it is Triton if that can run the call, too, whatever comes before it. For
    another algorithm it is the first platform that is registered for the backend: on a GPU of Triton and XLA, on a TPU
    of Pallas and XLA, elsewhere XLA. A requested platform is returned if the algorithm is registered for it with any
    backend.

    Args:
        algorithm: a name in the registry.
        platform: a platform, or "auto" or None to detect it.
        maybe_pallas: on a GPU, consider Pallas for another algorithm, after Triton and before XLA.

    Raises:
        ValueError: the algorithm is not registered, or not for the requested platform, or for none that runs here.
    """
    asked = None if platform == "auto" else platform
    found = kernel_registry.find(algorithm, asked)
    if asked is not None:
        return found.platform
    if (kernel := KERNELS.get(algorithm.lower())) is not None:
        running = _running(kernel)
        return Platform.TRITON if Platform.TRITON in running else running[0]
    backend = jax.default_backend()
    preference = _PREFERENCE.get(backend, (Platform.XLA,))
    if backend == "gpu" and maybe_pallas:
        preference = (Platform.TRITON, Platform.PALLAS, Platform.XLA)
    registered = {
        spec.platform
        for spec in kernel_registry.list_implementations(algorithm)
        if spec.backend in (Backend.ANY, backend)
    }
    for preferred in preference:
        if preferred in registered:
            return preferred
    raise ValueError(f"{algorithm}: registered on {sorted(registered) or 'nothing'} for {backend}, not on {preference}")


def _running(kernel: PrimitiveKernel) -> list[Platform]:
    """The platforms of the implementations that run the operation's example here, by descending priority."""
    operation = kernel.operation
    named, spec = types_of_call(operation.algorithm.name, **operation.example())
    found = candidates(kernel.name, spec, kernel.primitive.operands(named), device_target())
    return [entry.platform for entry, reason in found if reason is None]


def create_default_executor(
    persistent_cache_path: str | None = None,
    enable_autotuning: bool = True,
    warmup_iterations: int = 2,
    timing_iterations: int = 5,
) -> Executor[KernelConfig, Any]:
    """Deprecated: an executor with a cache in memory, and one on disk if a path is given.

    Write `Executor(ConfigSelectorChain(...))` instead:

        Executor(ConfigSelectorChain(
            cache=ConfigCache(),
            policy=AutotunePolicy(allow_autotune=True),
            tuner=Tuner(warmup=2, iters=5),
            persistent=PersistentCache("/tmp/kernel_cache"),
        ))
    """
    warnings.warn(
        "create_default_executor is deprecated; use Executor(ConfigSelectorChain(...))",
        DeprecationWarning,
        stacklevel=2,
    )
    return Executor(
        ConfigSelectorChain(
            cache=ConfigCache(),
            policy=AutotunePolicy(allow_autotune=enable_autotuning),
            tuner=Tuner(warmup_iterations, timing_iterations),
            persistent=PersistentCache(persistent_cache_path) if persistent_cache_path else None,
        )
    )
