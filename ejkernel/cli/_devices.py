"""The devices of this process by platform, and why there are none."""

import os
from collections.abc import Mapping, Sequence

import jax

from ._versions import version

PLUGINS: Mapping[str, Sequence[str]] = {
    "cpu": (),
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "rocm": ("jax-rocm7-plugin", "jax-rocm60-plugin"),
    "tpu": ("libtpu",),
}
"""For each platform, packages of which JAX needs one to see its devices."""


def available(platform: str) -> str:
    """The devices of a platform of JAX, or why there are none."""
    try:
        devices = jax.devices(platform)
    except (RuntimeError, AssertionError) as error:
        return f"none: {_missing(platform) or missing_backend() or _one_line(error)}"
    kinds = [device.device_kind for device in devices]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def missing_backend() -> str | None:
    """Why JAX has no device at all, so that every command that computes fails; None if it has one."""
    try:
        jax.devices()
    # JAX fails an assertion if JAX_PLATFORMS names only known platforms and there is no device of any of them.
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        reason = _one_line(error) or "there is no device of any of these platforms"
        return f"JAX_PLATFORMS={asked}: {reason}" if asked else reason
    return None


def _missing(platform: str) -> str | None:
    """Why JAX does not look for devices of a platform; None if it does."""
    allowed = os.environ.get("JAX_PLATFORMS")
    if allowed and platform not in allowed.split(","):
        return f"JAX_PLATFORMS={allowed} leaves it out"
    if PLUGINS[platform] and not any(map(version, PLUGINS[platform])):
        return f"{' or '.join(PLUGINS[platform])} is not installed"
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
