"""Which device a call is for: the target, and the names under which the guide asks for it."""

import functools
import re

import jax

from ejkernel.types import Platform, Target

_PLATFORM_OF_KIND = {"gpu": Platform.TRITON, "tpu": Platform.PALLAS}


def local_target() -> Target:
    """The target of what is traced here and now.

    It is the device of the mesh in use, which may be abstract (a program for a TPU that is traced on a host without
    one), else the device that `device_target` gives.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device_target() if device is None else _target(device)


@functools.cache
def target_of(platform: str) -> Target:
    """The target for one platform of a lowering; its kind is None where this process has no such device."""
    try:
        return Target(platform, jax.local_devices(backend=platform)[0].device_kind)
    except RuntimeError:
        return Target(platform)


def device_target() -> Target:
    """The target of the device that this process computes on by default: `jax.default_device`, else its first."""
    return _device_target(jax.config.jax_default_device)


@functools.cache
def _device_target(default_device: jax.Device | str | None) -> Target:
    if default_device is None or isinstance(default_device, str):
        default_device = jax.local_devices(backend=default_device)[0]
    return _target(default_device)


@functools.cache
def _target(device) -> Target:
    """Of a device, concrete or abstract. Both CUDA and ROCm devices call their platform "gpu"; their kinds tell."""
    platform, kind = device.platform, device.device_kind
    if platform == "gpu":
        platform = "rocm" if re.search("AMD|Instinct|Radeon|gfx", kind or "") else "cuda"
    return Target(platform, kind)


def device_kind() -> str:
    """ "gpu", "tpu" or "cpu"."""
    return str(local_target().backend)


def get_device_platform() -> str:
    """The platform that implementations for this device are written in: "triton", "pallas" or "xla"."""
    return str(_PLATFORM_OF_KIND.get(device_kind(), Platform.XLA))


def device_fingerprint(target: Target | None = None) -> str:
    """ "gpu|NVIDIA H200": what distinguishes the devices whose measured configs are kept apart."""
    target = target or local_target()
    return f"{target.backend}|{target.device_kind or target.platform}"
