"""Common parts of the modules: their config, platform detection, and the deprecated `create_default_executor`."""

import warnings
from typing import Any

import jax

from ejkernel.kernels._dispatch import candidates
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, PersistentCache, Tuner
from ejkernel.ops.utils.devices import device_target
from ejkernel.types import KernelConfig

from ._operation import OPERATIONS, types_of_call

__all__ = ["KernelConfig", "create_default_executor", "detect_platform"]

_PREFERENCE = {
    "gpu": (Platform.TRITON, Platform.XLA),
    "tpu": (Platform.PALLAS, Platform.XLA),
}


def detect_platform(algorithm: str, platform: Platform | str | None = "auto", maybe_pallas: bool = False) -> Platform:
    """The platform on which `algorithm` runs on the default backend.

    This is the first platform that is registered for the backend and usable here (Triton must be importable, for
    example): on a GPU of Triton and XLA, on a TPU of Pallas and XLA, elsewhere XLA. A requested platform is returned
    if the algorithm is registered for it with any backend.

    Args:
        algorithm: a name in the registry.
        platform: a platform, or "auto" or None to detect it.
        maybe_pallas: on a GPU, consider Pallas after Triton and before XLA.

    Raises:
        ValueError: the algorithm is not registered, or not for the requested platform, or for none that runs here.
    """
    if platform not in (None, "auto"):
        kernel_registry.find(algorithm, platform)
        return Platform(platform)
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
        if preferred in registered and _can_be_used(algorithm, preferred):
            return preferred
    raise ValueError(f"{algorithm}: registered on {sorted(registered) or 'nothing'} for {backend}, not on {preference}")


def _can_be_used(algorithm: str, platform: Platform) -> bool:
    """Whether the platform supports the operation's example here; True for algorithms that are not operations."""
    operation = OPERATIONS.get(algorithm.lower())
    if operation is None:
        return True
    named, spec = types_of_call(operation.algorithm.name, **operation.example())
    operands = operation.algorithm.forward.operands(named)
    found = candidates(operation.algorithm.name, spec, operands, device_target(), platform)
    return any(reason is None for _, reason in found)


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
