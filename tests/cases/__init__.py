"""Small calls of every operation that together touch all that it does. The tests in `transforms/` run each of them.

`cases/<operation>.py` defines `CASES`, `FAMILIES` for the tests of precision, and `PLAIN` and `FEATURES` for those of
pairs of features. With its registration that is all that a new operation needs to be tested.
"""

import pkgutil
from collections.abc import Sequence

import pytest

__path__ = pkgutil.extend_path(__path__, __name__)  # another package brings cases of its operations in such a folder

from ._case import Case, Operand
from ._features import FILES, PLAIN, call_with, features_of, pairs, together
from ._oracle import assert_close, curvature, curvature_by_reverse, gradient, oracle, pullback, tangent

__all__ = [
    "CASES",
    "DIFFERENTIABLE",
    "FAMILIES",
    "FORWARD_ONLY",
    "PLAIN",
    "Case",
    "Operand",
    "assert_close",
    "call_with",
    "curvature",
    "curvature_by_reverse",
    "each",
    "each_case",
    "each_differentiable",
    "each_operation",
    "features_of",
    "gradient",
    "oracle",
    "pairs",
    "pullback",
    "tangent",
    "together",
]

CASES: tuple[Case, ...] = tuple(case for file in FILES for case in file.CASES)
FAMILIES: tuple[Case, ...] = tuple(case for file in FILES for case in file.FAMILIES)
DIFFERENTIABLE = tuple(case for case in CASES if case.differentiable)
FORWARD_ONLY = tuple(case for case in CASES if not case.differentiable)


def each(
    cases: Sequence[Case],
    first: Sequence[pytest.MarkDecorator] = (pytest.mark.core,),
    rest: Sequence[pytest.MarkDecorator] = (),
) -> pytest.MarkDecorator:
    """Runs a test for each of the cases, with other marks for the first one of each operation than for the rest."""
    marks = lambda case: first if case in first_of_each(cases) else rest
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in cases])


def first_of_each(cases: Sequence[Case]) -> list[Case]:
    """The first case of each operation."""
    return list({case.operation: case for case in cases[::-1]}.values())


each_case = each(CASES)
each_differentiable = each(DIFFERENTIABLE)
each_operation = each(first_of_each(CASES))
