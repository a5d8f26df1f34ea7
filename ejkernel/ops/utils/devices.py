"""The device of a call: its target, kind, platform and fingerprint."""

import functools

import jax

from ejkernel.kernels._target import first_device, target_of_device
from ejkernel.types import Platform, Target

_PLATFORM_OF_KIND = {"gpu": Platform.TRITON, "tpu": Platform.PALLAS}


def local_target() -> Target:
    """The target of the program being traced.

    It is the device of the mesh in use, which may be abstract (a program for a TPU that is traced on a host without
    one), else the device that `device_target` gives.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device_target() if device is None else target_of_device(device)


def target_of(jax_platform: str) -> Target:
    """The target for one platform of a lowering: the device of the mesh in use, else of this process, on that platform.

    Its kind is None if there is neither.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and (target := target_of_device(device)).platform == jax_platform:
        return target
    return first_device(jax_platform) or Target(jax_platform)


def device_target() -> Target:
    """The target of the device that this process computes on by default: `jax.default_device`, else its first."""
    return _device_target(jax.config.jax_default_device)


@functools.cache
def _device_target(asked: jax.Device | str | None) -> Target:
    return target_of_device(_default_device(asked))


def default_device() -> jax.Device:
    """The device of `device_target`."""
    return _default_device(jax.config.jax_default_device)


def _default_device(asked: jax.Device | str | None) -> jax.Device:
    return jax.local_devices(backend=asked)[0] if asked is None or isinstance(asked, str) else asked


def device_kind() -> str:
    """The kind of hardware: "gpu", "tpu" or "cpu"."""
    return str(local_target().backend)


def get_device_platform() -> str:
    """The platform that implementations for this device are written in: "triton", "pallas" or "xla"."""
    return str(_PLATFORM_OF_KIND.get(device_kind(), Platform.XLA))


def device_fingerprint(target: Target | None = None) -> str:
    """The name under which configs of a kind of device are stored, such as "gpu|NVIDIA H200"."""
    target = target or local_target()
    return f"{target.backend}|{target.device_kind or target.platform}"
