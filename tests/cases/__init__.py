"""Small calls of every operation that together use all its features. The tests in `transforms/` run each of them.

`cases/<operation>.py` defines `CASES`, `FAMILIES` for the tests of precision, `PLAIN` and `FEATURES` for the tests of
pairs of features, and `TESTED_ELSEWHERE` for arguments that have tests of their own. A new operation needs only this
file and its registration to be tested.
"""

import functools
import pkgutil
from collections.abc import Sequence

import pytest

__path__ = pkgutil.extend_path(__path__, __name__)  # other packages may have such a folder of cases

from ._case import Case, Operand
from ._features import FILES, PLAIN, TESTED_ELSEWHERE, call_with, features_of, pairs, together
from ._oracle import assert_close, curvature, curvature_by_reverse, gradient, jitted, oracle, pullback, tangent

__all__ = [
    "CASES",
    "DIFFERENTIABLE",
    "FAMILIES",
    "FORWARD_ONLY",
    "PLAIN",
    "TESTED_ELSEWHERE",
    "Case",
    "Operand",
    "assert_close",
    "call_with",
    "called_alone",
    "core_of_kind",
    "curvature",
    "curvature_by_reverse",
    "each",
    "each_by_kind",
    "each_case",
    "each_differentiable",
    "each_operation",
    "each_with_another_operand",
    "features_of",
    "first_of_each",
    "gradient",
    "jitted",
    "oracle",
    "pairs",
    "pullback",
    "tangent",
    "together",
    "with_another_operand",
    "with_primitives",
]

# Of each kind of operation the one that stands for it in tests of what is the same for a kind, if it has such cases.
# These have batch and heads, and XLA compiles them fast.
REPRESENTATIVES = ("flash_attention", "page_attention", "ragged_page_attention_v3", "merge_attention")
CASES: tuple[Case, ...] = tuple(case for file in FILES for case in file.CASES)
FAMILIES: tuple[Case, ...] = tuple(case for file in FILES for case in file.FAMILIES)
DIFFERENTIABLE = tuple(case for case in CASES if case.differentiable)
FORWARD_ONLY = tuple(case for case in CASES if not case.is_composed and not case.differentiable)


def with_primitives(cases: Sequence[Case]) -> list[Case]:
    """Cases of operations that have primitives, not composed ones: for tests of what primitives provide."""
    return [case for case in cases if not case.is_composed]


def called_alone(cases: Sequence[Case]) -> list[Case]:
    """Cases not over mesh axes inside `jax.shard_map`: for tests whose own mesh has these axes."""
    return [case for case in cases if not case.over]


def each(
    cases: Sequence[Case],
    first: Sequence[pytest.MarkDecorator] = (pytest.mark.core,),
    rest: Sequence[pytest.MarkDecorator] = (),
) -> pytest.MarkDecorator:
    """Runs a test for each of the cases, with other marks for the first case of each operation than for the rest.

    Cases over a mesh, which take XLA longer to compile, are not in the core, and slow except the first in such tests.
    """

    def marks(case):
        is_first = case in first_of_each(cases)
        if case.over:
            return () if is_first and pytest.mark.core in first else (pytest.mark.slow,)
        return first if is_first else rest

    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in cases])


def each_by_kind(
    cases: Sequence[Case],
    rest: Sequence[pytest.MarkDecorator] = (),
    first_over: Sequence[pytest.MarkDecorator] = (pytest.mark.slow,),
) -> pytest.MarkDecorator:
    """As `each`, in the core only for the first case of each kind of operation, for tests of rules of the kind.

    The first case of an operation that is called over a mesh has the marks of `first_over`; its others are slow.
    """
    over = lambda case: first_over if case in first_of_each(cases) else (pytest.mark.slow,)
    alone = lambda case: core_of_kind(case, cases) if case in first_of_each(cases) else rest
    marks = lambda case: over(case) if case.over else alone(case)
    params = [pytest.param(case, id=str(case), marks=marks(case)) for case in cases]
    return pytest.mark.parametrize("case", params)


def each_with_another_operand(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """As `each`, but slow for cases without an operand that earlier cases lack.

    For tests of operations on operands, which options do not change.
    """
    new = with_another_operand(cases)
    marks = lambda case: () if case in new and not case.over else (pytest.mark.slow,)
    of_first = lambda case: () if case.over else (pytest.mark.core,)
    params = [
        pytest.param(case, id=str(case), marks=of_first(case) if case in first_of_each(cases) else marks(case))
        for case in cases
    ]
    return pytest.mark.parametrize("case", params)


def with_another_operand(cases: Sequence[Case]) -> list[Case]:
    """The first case of each operation, and those with an operand that no earlier case of it has."""
    found, seen = [], set()
    for case in cases:
        operands = {(case.operation, name) for name in case.operands}
        if operands - seen:
            found.append(case)
        seen |= operands
    return found


def core_of_kind(case: Case, cases: Sequence[Case]) -> Sequence[pytest.MarkDecorator]:
    """The mark `core` if a case is the first of its kind among the cases."""
    return (pytest.mark.core,) if case in first_of_each_kind(cases) else ()


def first_of_each(cases: Sequence[Case]) -> list[Case]:
    """The first case of each operation."""
    return list({case.operation: case for case in cases[::-1]}.values())


def first_of_each_kind(cases: Sequence[Case]) -> list[Case]:
    """The first case of each kind of operation: differentiable, forward only, in place, and composed.

    It is one of `REPRESENTATIVES` if there is one, and none is over a mesh, as XLA compiles these for longer.
    """
    return _first_of_each_kind(tuple(cases))


@functools.cache
def _first_of_each_kind(cases: tuple[Case, ...]) -> list[Case]:
    in_place = lambda case: not case.is_composed and bool(getattr(case.algorithm, "in_place", None))
    kind = lambda case: (case.is_composed, bool(case.differentiable), in_place(case))
    by_preference = sorted(called_alone(cases), key=lambda case: case.operation not in REPRESENTATIVES)
    return list({kind(case): case for case in by_preference[::-1]}.values())


each_case = each(CASES)
each_differentiable = each(DIFFERENTIABLE)
each_operation = each(first_of_each(CASES))
