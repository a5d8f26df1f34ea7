"""Mamba's state space in Triton: the kernels' masks and indices, by the interpreter, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_v1_cases import CASES, Case, check_all, differentiable, like

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.state_space_v1 import state_space_v1, state_space_v1_bwd, state_space_v1_jvp  # noqa: E402

from . import interpreter  # noqa: E402

CONFIG = RecurrenceConfig(chunk_size=16, block_v=16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_interpreter(case, dtype):
    """Forward, backward and tangent; tokens of no sequence hold NaN."""
    check_all(
        lambda *x: state_space_v1(*x, config=CONFIG),
        lambda x, ct, wrt: state_space_v1_bwd(x, None, ct, wrt=wrt, config=CONFIG),
        lambda x, dot: state_space_v1_jvp(x, None, dot, config=CONFIG),
        case.make(37, dtype),
        dtype,
    )


@pytest.mark.parametrize("absent", ("o", "final_state"))
def test_a_cotangent_of_zero(absent):
    x = Case("states of 16", B=1).make(20, jnp.float32)
    cotangents, wrt = like(state_space_v1(*x, config=CONFIG)), differentiable(x)
    bwd = lambda cotangents: state_space_v1_bwd(x, None, cotangents, wrt=wrt, config=CONFIG)
    zeros = cotangents._replace(**{absent: jnp.zeros_like(getattr(cotangents, absent))})
    for found, wanted in zip(bwd(cotangents._replace(**{absent: None})), bwd(zeros), strict=True):
        np.testing.assert_array_equal(found, wanted)
