"""Results equal those of the formula."""

from cases import CASES, FAMILIES, assert_close, each_case, oracle

from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS


def test_every_operation_has_cases():
    """At least some composed operations have; the others take no arrays, or are called over a mesh."""
    tested = {case.operation for case in CASES}
    assert OPERATIONS.keys() <= tested <= OPERATIONS.keys() | COMPOSED.keys()
    assert tested == {case.operation for case in FAMILIES}


@each_case
def test_eval(case):
    arrays = case.arrays()
    assert_close(case.call(arrays), oracle(case)(arrays))
