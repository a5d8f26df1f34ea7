"""Mamba's state space in Triton: the kernels' masks and indices, by the interpreter, against float64."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_v1_cases import CASES, SPEC, Case, check, check_all, differentiable, formula, like

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.state_space_v1 import splits, state_space_v1, state_space_v1_bwd, state_space_v1_jvp  # noqa: E402
from ejkernel.kernels._triton.state_space_v1.problem import problem_of  # noqa: E402

from . import interpreter  # noqa: E402

CONFIG = RecurrenceConfig(chunk_size=16, block_v=16)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    monkeypatch.setattr(_launch, "has_ptx", lambda: False)


def run_all(x, dtype):
    check_all(
        lambda *x: state_space_v1(*x, config=CONFIG),
        lambda x, ct, wrt: state_space_v1_bwd(x, None, ct, wrt=wrt, config=CONFIG),
        lambda x, dot: state_space_v1_jvp(x, None, dot, config=CONFIG),
        x,
        dtype,
    )


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=lambda dtype: dtype.dtype.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_the_interpreter(case, dtype):
    """Forward, backward and tangent; tokens of no sequence hold NaN."""
    run_all(replace(case, H=20).make(37, dtype), dtype)


@pytest.mark.parametrize("length", (1, 3))
def test_a_few_tokens(length):
    x = CASES[0].make(length, jnp.float32)
    outputs = state_space_v1(*x, config=CONFIG)
    exact, rounded = (formula(x, SPEC, like(outputs), dtype)[0] for dtype in (jnp.float64, None))
    check((outputs, {}), (exact, {}), (rounded, {}), jnp.float32)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_parts_of_sequences(case, monkeypatch):
    """Forward, backward and tangent with sequences cut in two, of which the second does not end with a chunk."""
    monkeypatch.setattr(splits, "SHORTEST", 10)
    x = replace(case, H=20).make(42, jnp.float32)
    assert splits.number_of(problem_of(x, CONFIG)) == 2
    run_all(x, jnp.float32)


@pytest.mark.parametrize("absent", ("o", "final_state"))
def test_a_cotangent_of_zero(absent):
    x = Case("states of 16", B=1).make(20, jnp.float32)
    cotangents, wrt = like(state_space_v1(*x, config=CONFIG)), differentiable(x)
    bwd = lambda cotangents: state_space_v1_bwd(x, None, cotangents, wrt=wrt, config=CONFIG)
    zeros = cotangents._replace(**{absent: jnp.zeros_like(getattr(cotangents, absent))})
    for found, wanted in zip(bwd(cotangents._replace(**{absent: None})), bwd(zeros), strict=True):
        np.testing.assert_array_equal(found, wanted)
