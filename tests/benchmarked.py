"""Contenders for tests: one with given results, one that raises, and this library as another version."""

from pathlib import Path

import ejkernel
from benchmarks import _harness as harness


def prepared(results, batch):
    return lambda: harness.Prepared(results, batch)


def breaks(*_):
    raise RuntimeError("out of\n memory")


def installed(folder):
    """A copy of this library in a folder, laid out like an installed package."""
    (folder / "ejkernel").mkdir(parents=True)
    files = {file.name: file for file in Path(ejkernel.__path__[0]).iterdir()}
    for name, file in (files | {"lowering": ejkernel.lowering.__path__[0]}).items():
        (folder / "ejkernel" / name).symlink_to(file)
