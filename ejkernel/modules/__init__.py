"""Operations as kernel objects and as functions that choose their platform and mesh."""

import importlib
import pathlib
import pkgutil

from ..ops import PersistentCache as _PersistentCache
from ..ops.config.tables import shipped_tables as _shipped_tables
from . import operations as _operations
from ._face import face as _face
from ._operation import OPERATIONS as _OPERATIONS
from .base import KernelConfig, create_default_executor, detect_platform

for _found in pkgutil.iter_modules(_operations.__path__):
    if not _found.name.startswith("_"):
        importlib.import_module(f"{_operations.__name__}.{_found.name}")

for _name, _operation in _OPERATIONS.items():
    globals()[_name], globals()[_operation.__name__] = _face(_operation), _operation

# tuned/gpu_NVIDIA_H200.json, say: the file of a cache directory in which the device was measured.
_shipped_tables.append(_PersistentCache(pathlib.Path(__file__).parent / "tuned"))

__all__ = ["KernelConfig", "create_default_executor", "detect_platform"]
__all__ += sorted([*_OPERATIONS, *(operation.__name__ for operation in _OPERATIONS.values())])
