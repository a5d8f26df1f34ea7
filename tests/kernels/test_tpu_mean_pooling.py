"""mean_pooling on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons fresh memory."""

import jax
import pytest
from cases import CASES
from jax.experimental.pallas import tpu as pltpu

from ejkernel.types import KernelConfig

from . import against_xla

CONFIG = KernelConfig(block_q=8, block_k=128)
OURS = [case for case in CASES if case.operation == "mean_pooling"]


def interpreted(f):
    """f, jitted, in the interpreter."""

    def run(*args):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
            return jax.jit(f)(*args)

    return run


@pytest.mark.parametrize("case", OURS, ids=str)
def test_in_the_interpreter(case):
    """Forward, backward and tangent; sequences cross blocks, and tokens of none hold NaN."""
    case = case.resized(dict(s=40, d=256))
    against_xla.check(case, against_xla.prepared(case), "pallas", "tpu", CONFIG, run=interpreted)
