"""Lists installed versions, devices, registered implementations and shipped tables of configs."""

import argparse
from pathlib import Path

from ..kernels._registry import kernel_registry
from ..modules._primitive_kernel import KERNELS
from ..ops.config.tables import SHIPPED
from ..ops.utils.fingerprints import versions_fingerprint
from ..ops.utils.shared_file import read_entries
from ..types import Target
from ._devices import PLUGINS, available
from ._table import print_rows
from ._versions import versions

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables."""
    del arguments
    print_rows("Versions", {name: version or "not installed" for name, version in versions().items()})
    print_rows("Platforms", {name: available(name) for name in PLUGINS})
    print_rows(
        "Implementations, by falling priority", {name: _registered(name) for name in kernel_registry.list_algorithms()}
    )
    print_rows("Tuned tables", _tuned())
    return 0


def _registered(algorithm: str) -> str:
    entries = kernel_registry.list_implementations(algorithm)
    return "   ".join(f"{entry.platform}/{entry.backend} ({entry.priority})" for entry in entries)


def _tuned() -> dict[str, str]:
    """For each shipped table, how many configs it has, and how many of these fit the installed kernels and versions."""
    sources = {kernel.source_fingerprint(target) for kernel in KERNELS.values() for target in map(Target, _PLATFORMS)}
    here = {f"|source {source}|{versions_fingerprint()}" for source in sources}
    found = {}
    for file in sorted(Path(SHIPPED.path_of("any device")).parent.glob("*.json")):
        keys = read_entries(file)
        fitting = sum(any(key.endswith(end) for end in here) for key in keys)
        found[file.stem] = f"{len(keys)} configs, {fitting} of what is installed here"
    return found
