"""quantized_matmul on TPU: numbers, in the interpreter that simulates the chip and finds races."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases.quantized_matmul import few_rows

from ejkernel.kernels._registry import kernel_registry
from ejkernel.types import Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

from . import against_xla
from .tpu_interpreter import interpreted

CONFIG = QuantizedMatmulConfig(block_m=16, block_n=1, block_k=128, platform="pallas", backend="tpu")


def implementation(*of):
    return kernel_registry.find(*of).implementation


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


@pytest.mark.parametrize("operand", ("scales", "zeros"))
@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_groups_that_are_not_finite_change_no_others(operand, bad):
    """Columns of other groups are those of XLA."""
    of = few_rows(4, 16, False, 3, 40, 48)
    x, spec, _ = against_xla.prepared(of)
    x = x._replace(**{operand: getattr(x, operand).at[:, 7, :, 1].set(bad)})
    found = interpreted(lambda *x: implementation("quantized_matmul", "pallas", "tpu")(*x, spec=spec, config=CONFIG))(
        *x
    )
    wanted = implementation("quantized_matmul", "xla", "any")(*x, spec=spec)
    is_other = np.arange(3) != 1
    assert not np.isfinite(found.o[:, :, :, 1]).any()
    np.testing.assert_allclose(found.o[:, :, :, is_other], wanted.o[:, :, :, is_other], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (np.float16, np.float64))
def test_scales_that_mosaic_does_not_load(dtype):
    x, spec, _ = against_xla.prepared(few_rows(4, 16, False, 3, 40, 48))
    x = x._replace(scales=np.asarray(x.scales, dtype))
    reason = implementation("quantized_matmul", "pallas", "tpu").supports(spec, x, Target("tpu", "TPU v5 lite"))
    assert reason == f"scales is {np.dtype(dtype)}; the TPU kernel takes bfloat16 and float32"
