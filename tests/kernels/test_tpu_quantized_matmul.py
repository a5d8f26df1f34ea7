"""quantized_matmul on TPU: numbers, in the interpreter that simulates the chip and finds races."""

import jax.numpy as jnp
import pytest
from cases.quantized_matmul import few_rows

from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from . import against_xla
from .tpu_interpreter import interpreted

CONFIG = QuantizedMatmulConfig(block_m=16, block_n=1, block_k=128, platform="pallas", backend="tpu")


# Whole rows of codes in a tile, and tiles that end beyond the last group and the last row; rows of x in several tiles.
QUICK = ((4, 16, False, 3, 40, 48), (4, 16, True, 3, 2112, 136))
CALLS = (
    (4, 16, False, 1, 200, 2112),
    (4, 64, False, 20, 130, 192),
    (8, 16, False, 8, 136, 2064),
    (2, 32, False, 5, 33, 96),
    (1, 32, False, 5, 16, 64),
    (8, 32, True, 8, 96, 33),
    (2, 16, True, 20, 2064, 17),
)


@pytest.mark.parametrize("sizes", [*QUICK, *(pytest.param(x, marks=pytest.mark.slow) for x in CALLS)], ids=str)
def test_in_the_interpreter(sizes):
    """Forward, backward and tangent."""
    of = few_rows(*sizes)
    against_xla.check(of, against_xla.prepared(of), "pallas", "tpu", CONFIG, run=interpreted)


@pytest.mark.parametrize("transpose", (False, True))
def test_bfloat16_in_the_interpreter(transpose):
    """Weights and results are rounded as in XLA; only the order of sums differs."""
    of = few_rows(4, 32, transpose, 4, 64, 64)
    prepared = against_xla.prepared(of, jnp.bfloat16)
    against_xla.check(of, prepared, "pallas", "tpu", CONFIG, tolerance=1e-2, run=interpreted)
