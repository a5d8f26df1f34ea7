"""The target that an implementation is traced for, where its `spec` and `config` do not say enough.

What it compiles to may depend on the device: the architecture, how many programs run at once.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from ..types import Target

_lowered_for: ContextVar[Target | None] = ContextVar("ejkernel_lowered_for", default=None)


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """While an implementation is traced for `target`."""
    before = _lowered_for.set(target)
    try:
        yield
    finally:
        _lowered_for.reset(before)


def gpu_target() -> Target:
    """What the implementation that is being traced is for: what a lowering says, else the GPU of this process.

    Without either it is the GPU that is assumed where there is none, `Target("cuda")`.
    """
    if (target := _lowered_for.get()) is not None:
        return target
    return next((found for platform in ("rocm", "cuda") if (found := first_device(platform))), Target("cuda"))


@functools.cache
def first_device(platform: str) -> Target | None:
    """The target that is this process's first device of a platform of JAX; None without one."""
    try:
        return target_of_device(jax.local_devices(backend=platform)[0])
    except RuntimeError:
        return None


@functools.cache
def target_of_device(device: Any) -> Target:
    """Of a device, concrete or abstract. Both CUDA and ROCm devices call their platform "gpu"; their kinds tell.

    A CUDA device tells its compute capability and how many multiprocessors it has. An abstract one is taken for that of
    this process which is of its kind, if there is one.
    """
    platform, kind = device.platform, device.device_kind
    if platform != "gpu":
        return Target(platform, kind)
    if re.search("AMD|Instinct|Radeon|gfx", kind or ""):
        return Target("rocm", kind)
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        here = first_device("cuda")
        return here if here is not None and here.device_kind == kind else Target("cuda", kind)
    return Target("cuda", kind, round(10 * float(capability)), getattr(device, "core_count", None))
