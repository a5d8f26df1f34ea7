"""mean_pooling on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons fresh memory."""

import pytest
from cases import CASES

from ejkernel.types.mean_pooling import MeanPoolingConfig

from . import against_xla
from .tpu_interpreter import interpreted

CONFIG = MeanPoolingConfig(block_s=8, block_d=128)
OURS = [case for case in CASES if case.operation == "mean_pooling"]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c.name == "packed" else pytest.mark.slow) for c in OURS]
)
def test_in_the_interpreter(case):
    """Forward, backward and tangent; sequences cross blocks, and tokens of none hold NaN."""
    case = case.resized(dict(s=40, d=256))
    against_xla.check(case, against_xla.prepared(case), "pallas", "tpu", CONFIG, run=interpreted)
