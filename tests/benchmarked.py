"""Contenders of tests: one that is prepared with these results, one that breaks, and this library as another."""

from pathlib import Path

import ejkernel
from benchmarks import _harness as harness


def prepared(results, batch):
    return lambda: harness.Prepared(results, batch)


def breaks(*_):
    raise RuntimeError("out of\n memory")


def installed(folder):
    """This library in a folder, under the names that an installation gives it."""
    (folder / "ejkernel").mkdir(parents=True)
    files = {file.name: file for file in Path(ejkernel.__path__[0]).iterdir()}
    for name, file in (files | {"lowering": ejkernel.lowering.__path__[0]}).items():
        (folder / "ejkernel" / name).symlink_to(file)
