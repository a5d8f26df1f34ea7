"""grouped_matmul in Triton: every kernel's masks and indices, by the interpreter, with pointers in place of TMA."""

from dataclasses import replace

import pytest
from cases import CASES, Operand
from cases.grouped_matmul import beyond_32_bits

from ejkernel.types import KernelConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402

from . import against_xla, interpreter  # noqa: E402

CONFIG = KernelConfig(block_q=16, block_k=16, block_d=16)
OURS = [case for case in CASES if case.operation == "grouped_matmul"]


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_descriptors", lambda: False)
    monkeypatch.setattr(_launch, "multiprocessors", lambda: 2)


@pytest.mark.parametrize("case", OURS, ids=str)
def test_in_the_interpreter(case, interpreted):
    """Forward, backward and tangent; the groups cross blocks, and rows of no group hold NaN."""
    case = case.resized(dict(k=20, n=24))
    against_xla.check(case, against_xla.prepared(case), "triton", "gpu", CONFIG)


def test_a_batch_that_shares_the_matrices(interpreted):
    against_xla.check(OURS[0], against_xla.batched(OURS[0]), "triton", "gpu", CONFIG)


def test_what_belongs_to_empty_groups_may_be_nan(interpreted):
    case = replace(OURS[0], operands=OURS[0].operands | dict(rhs_scale=Operand("e n")))
    against_xla.check(case, against_xla.poisoned(against_xla.prepared(case)), "triton", "gpu", CONFIG)


def test_sizes_that_add_up_to_more_than_32_bits_hold(interpreted):
    """Groups past the last row have none, and the sum does not wrap around."""
    huge = replace(OURS[0], operands={**OURS[0].operands, "group_sizes": Operand("e", beyond_32_bits)})
    against_xla.check(huge, against_xla.prepared(huge), "triton", "gpu", CONFIG)
