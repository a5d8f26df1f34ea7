"""Small calls of every operation that together touch all that it does. The tests in `transforms/` run each of them.

`cases/<operation>.py` defines `CASES`, and `FAMILIES` for the tests of precision. With its registration that is all
that a new operation needs to be tested.
"""

import importlib
import pkgutil

import pytest

from ._case import Case, Operand
from ._oracle import assert_close, curvature, curvature_by_reverse, gradient, oracle, pullback, tangent

__all__ = [
    "CASES",
    "FAMILIES",
    "Case",
    "Operand",
    "assert_close",
    "curvature",
    "curvature_by_reverse",
    "each_case",
    "each_operation",
    "gradient",
    "oracle",
    "pullback",
    "tangent",
]

_FILES = [
    importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if not found.name.startswith("_")
]

CASES: tuple[Case, ...] = tuple(case for file in _FILES for case in file.CASES)
FAMILIES: tuple[Case, ...] = tuple(case for file in _FILES for case in file.FAMILIES)

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_operation = pytest.mark.parametrize("case", {case.operation: case for case in CASES[::-1]}.values(), ids=str)
