"""Kernels as operations of JAX: pure functions of arrays and static options, each file one operation."""

import importlib
import pkgutil

__all__ = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))

for _name in __all__:
    globals()[_name] = getattr(importlib.import_module(f"{__name__}.{_name}"), _name)
