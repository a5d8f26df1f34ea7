"""The registry of calls: for each operation one file with the layers of real models that it is measured on.

A file has the sizes and options of its calls, how their work is counted, and who the rivals are. Benchmarks, tests,
`ejkernel tune --model`, `ejkernel explain --model` and the tables of the documents take them from here. A file that is
put here is found: there is no list to add it to.
"""

import importlib
import pkgutil
from functools import cache

from ._shape import TBYTES, TFLOPS, Shape

__all__ = ["TBYTES", "TFLOPS", "Shape", "measured_operations", "shape_named", "shapes_of"]


@cache
def measured_operations() -> tuple[str, ...]:
    """The operations that have named calls."""
    return tuple(sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")))


@cache
def shapes_of(operation: str) -> dict[str, Shape]:
    """The named calls of an operation by name; none where it has no file here."""
    if operation not in measured_operations():
        return {}
    return importlib.import_module(f"{__name__}.{operation}").SHAPES


def shape_named(name: str) -> tuple[str, Shape]:
    """The operation and the call of a name."""
    for operation in measured_operations():
        if name in shapes_of(operation):
            return operation, shapes_of(operation)[name]
    raise ValueError(
        f"no call is named {name}; there are {', '.join(n for o in measured_operations() for n in shapes_of(o))}"
    )
