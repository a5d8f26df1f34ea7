"""grouped_matmul on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons fresh memory."""

from dataclasses import replace

import pytest
from cases import CASES, Operand

from ejkernel.types import KernelConfig

from . import against_xla
from .tpu_interpreter import interpreted

CONFIG = KernelConfig(block_q=8, block_k=128, block_d=128)
QUICK = ("uneven", "none")  # the others take the interpreter half a minute each
OURS = [case for case in CASES if case.operation == "grouped_matmul"]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c.name in QUICK else pytest.mark.slow) for c in OURS]
)
def test_in_the_interpreter(case):
    """Forward, backward and tangent; the groups cross blocks, and rows of no group hold NaN."""
    case = case.resized(dict(k=256, n=130))
    against_xla.check(case, against_xla.prepared(case), "pallas", "tpu", CONFIG, run=interpreted)


def test_a_batch_that_shares_the_matrices():
    against_xla.check(OURS[0], against_xla.batched(OURS[0]), "pallas", "tpu", CONFIG, run=interpreted)


def test_what_belongs_to_empty_groups_may_be_nan():
    case = replace(OURS[0], operands=OURS[0].operands | dict(rhs_scale=Operand("e n")))
    against_xla.check(case, against_xla.poisoned(against_xla.prepared(case)), "pallas", "tpu", CONFIG, run=interpreted)
