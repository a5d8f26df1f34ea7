"""The source files of an implementation, on which its measured times depend."""

import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ._registry import KernelSpec

PACKAGE = Path(__file__).parents[1]
"""The folder of `ejkernel`."""

# Files that only register and dispatch kernels; neither results nor speed of a kernel depend on them.
_MACHINERY = {"_dispatch.py", "_registry.py", "_sources.py", "_kernel_trio.py", "_signatures.py"}
# Folders of implementations; importing one module of them does not import the others.
_FOLDERS = {"_xla", "_triton", "_pallas", "gpu", "tpu", "_cuda"}
_IMPORT = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def files_of(entries: Iterable[KernelSpec]) -> list[Path]:
    """The files of the implementations and those that they import, directly or not, from the packages of kernels.

    The kernels of a package are imported only when they are needed: for one of a `KernelTrio` these are the modules
    that it names, for others all files of the package.
    """
    found, ahead = set(), [file for entry in entries for file in _own_files(entry)]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ahead += imported_files(file)
    return sorted(found)


def fingerprint(files: Iterable[Path]) -> str:
    """A hash of the contents of the files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _own_files(entry: KernelSpec) -> list[Path]:
    module = sys.modules[entry.implementation.__module__]
    file = Path(module.__file__)
    if not hasattr(module, "__path__"):
        return [file]
    if named := getattr(entry.implementation, "modules", ()):
        return [file, *(file.with_name(f"{name}.py") for name in named)]
    return list(file.parent.glob("*.py"))


@functools.cache
def imported_files(file: Path) -> tuple[Path, ...]:
    """The files of `kernels` and `xla_utils` that a file of the library imports anywhere, `from … import …`."""
    if not file.is_relative_to(PACKAGE):
        return ()
    here = ("ejkernel", *file.parent.relative_to(PACKAGE).parts)
    imported = (_modules(here, *match.groups()) for match in _IMPORT.finditer(file.read_text(encoding="utf-8")))
    files = (_file(module) for modules in imported for module in modules)
    return tuple(dict.fromkeys(found for found in files if found is not None))


def _modules(here: tuple[str, ...], source: str, names: str) -> Iterator[tuple[str, ...]]:
    """What `from source import names` may import, within the package `here`: the source itself, or modules of it."""
    name = source.lstrip(".")
    up = len(source) - len(name)
    parts = (*(here[: len(here) - up + 1] if up else ()), *filter(None, name.split(".")))
    yield parts
    for imported in re.sub(r"#[^\n]*", "", names.strip("()")).split(","):
        yield (*parts, imported.split(" as ")[0].strip())


def _file(parts: tuple[str, ...]) -> Path | None:
    if parts[:2] not in (("ejkernel", "kernels"), ("ejkernel", "xla_utils")) or len(parts) < 3:
        return None
    file = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
    if parts[-1] not in _FOLDERS and not file.is_file():
        file = PACKAGE.joinpath(*parts[1:], "__init__.py")
    return file if file.name not in _MACHINERY and file.is_file() else None
