"""The registry of calls: for each operation a file with the layers of real models that it is measured on.

A file has the sizes and options of its calls, the formula of their work, and the names of rivals. Benchmarks, tests,
`ejkernel tune --model`, `ejkernel explain --model` and the tables of the documents use it. A new file needs no
registration.
"""

import importlib
import pkgutil
from functools import cache

from ._shape import TBYTES, TFLOPS, Shape

__all__ = ["TBYTES", "TFLOPS", "Shape", "measured_operations", "shape_named", "shapes_of"]


@cache
def measured_operations() -> tuple[str, ...]:
    """The names of the operations that have named calls."""
    return tuple(sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")))


@cache
def shapes_of(operation: str) -> dict[str, Shape]:
    """The calls of an operation by name; none if it has no file here."""
    if operation not in measured_operations():
        return {}
    return importlib.import_module(f"{__name__}.{operation}").SHAPES


def shape_named(name: str) -> tuple[str, Shape]:
    """The operation and the call with this name."""
    for operation in measured_operations():
        if name in shapes_of(operation):
            return operation, shapes_of(operation)[name]
    raise ValueError(
        f"no call is named {name}; there are {', '.join(n for o in measured_operations() for n in shapes_of(o))}"
    )
