"""Implementations: functions from arrays to arrays, each registered with `kernels._registry` when it is imported.

A file in one of the folders (`_xla/`, `_triton/`, `_pallas/tpu/` …) is one algorithm; no other file names it. A file
must be importable without the framework that its kernels are written in: `supports` says if that is missing.
"""

import importlib
import pkgutil

_FOLDERS = ("_xla", "_triton", "_pallas.tpu", "_pallas.gpu", "_cuda")

for _folder in _FOLDERS:
    _package = importlib.import_module(f"{__name__}.{_folder}")
    for _found in pkgutil.iter_modules(_package.__path__):
        if not _found.name.startswith("_"):
            importlib.import_module(f"{_package.__name__}.{_found.name}")
