"""Results are those of the formula."""

from cases import CASES, FAMILIES, assert_close, each_case, oracle

from ejkernel.modules._operation import OPERATIONS


def test_every_operation_has_cases():
    assert OPERATIONS.keys() == {case.operation for case in CASES} == {case.operation for case in FAMILIES}


@each_case
def test_eval(case):
    arrays = case.arrays()
    assert_close(case.call(arrays), oracle(case)(arrays))
