"""The target for which an implementation is being traced, as what it compiles to may depend on the device.

It may depend, for example, on the architecture and on how many programs run at once.
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
    """A context in which implementations are traced for `target`."""
    before = _lowered_for.set(target)
    try:
        yield
    finally:
        _lowered_for.reset(before)


def gpu_target() -> Target:
    """The target of the implementation that is being traced: that of the lowering, else the GPU of this process.

    Without either it is `Target("cuda")`, the GPU that is assumed if there is none.
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
    """The target of a device, concrete or abstract; CUDA and ROCm devices, both "gpu", are told apart by their kinds.

    A CUDA device has a compute capability and a number of multiprocessors. For an abstract device these are taken from
    a device of the same kind in this process, if there is one.
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
