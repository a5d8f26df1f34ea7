"""The device kind behind a platform name, where this process has such a device."""

from functools import cache

import jax

from ejkernel.types import Target


@cache
def target_of(platform: str) -> Target:
    """The target for one platform of a lowering; its kind is None when no such device is here."""
    try:
        return Target(platform, jax.local_devices(backend=platform)[0].device_kind)
    except RuntimeError:
        return Target(platform)
