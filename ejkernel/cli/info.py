"""What is installed, which devices there are, and which implementations are registered."""

import argparse
import os
import platform
from importlib import metadata
from pathlib import Path

import jax

from ..kernels._registry import kernel_registry
from ..modules._operation import KERNELS
from ..ops.config.tables import shipped_tables
from ..ops.utils.fingerprints import versions_fingerprint
from ..ops.utils.shared_file import read_entries

_PACKAGES = ("ejkernel", "jax", "jaxlib", "numpy", "triton", "jax-triton", "libtpu")
_PLUGINS = {
    "cpu": (),
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "rocm": ("jax-rocm7-plugin", "jax-rocm60-plugin"),
    "tpu": ("libtpu",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables."""
    del arguments
    _table("Versions", {name: version or "not installed" for name, version in versions().items()})
    _table("Platforms", {name: available(name) for name in _PLUGINS})
    _table(
        "Implementations, by falling priority", {name: _registered(name) for name in kernel_registry.list_algorithms()}
    )
    _table("Tuned tables", _tuned())
    return 0


def versions(*more: str) -> dict[str, str | None]:
    """Of Python, the packages that take part in a computation, and `more`; None where one is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in (*_PACKAGES, *more)}}


def available(name: str) -> str:
    """The devices of a platform of JAX, or why there are none."""
    try:
        devices = jax.devices(name)
    except RuntimeError as error:
        return f"none: {_missing(name) or error}"
    kinds = [device.device_kind for device in devices]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def _missing(name: str) -> str | None:
    """What keeps JAX from looking for such devices at all."""
    allowed = os.environ.get("JAX_PLATFORMS")
    if allowed and name not in allowed.split(","):
        return f"JAX_PLATFORMS={allowed} leaves it out"
    if not any(map(_version, _PLUGINS[name])):
        return f"{' or '.join(_PLUGINS[name])} is not installed"
    return None


def _registered(algorithm: str) -> str:
    entries = kernel_registry.list_implementations(algorithm)
    return "   ".join(f"{entry.platform}/{entry.backend} ({entry.priority})" for entry in entries)


def _tuned() -> dict[str, str]:
    """Of each table that is shipped, how many configs it has, and how many of those are of the kernels here."""
    here = {f"|source {kernel.source_fingerprint()}|{versions_fingerprint()}" for kernel in KERNELS.values()}
    found = {}
    for table in shipped_tables:
        for file in sorted(Path(table.path_of()).parent.glob("*.json")):
            keys = read_entries(file)
            fitting = sum(any(key.endswith(end) for end in here) for key in keys)
            found[file.stem] = f"{len(keys)} configs, {fitting} of what is installed here"
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _table(title: str, rows: dict[str, str]) -> None:
    width = max(map(len, rows), default=0)
    print(f"{title}\n" + "".join(f"  {name:<{width}}  {value}\n" for name, value in rows.items()))
