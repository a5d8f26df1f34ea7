"""Mamba-2's state space in Triton: the kernels' masks and indices, by the interpreter, against float64."""

import jax.numpy as jnp
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_cases import CASES, SPEC, Case, check, check_all, formula, like

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.state_space_v2 import state_space_v2, state_space_v2_bwd, state_space_v2_jvp  # noqa: E402

from . import interpreter  # noqa: E402

BLOCKS = dict(chunk_size=16, block_v=32, block_k=16)
CONFIG = RecurrenceConfig(**BLOCKS, algorithm="chunks")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.ends else pytest.mark.slow) for case in CASES]
)
def test_in_the_interpreter(case):
    """Forward, backward and tangent in float32; tokens of no sequence hold NaN."""
    check_all(
        lambda *x: state_space_v2(*x, config=CONFIG),
        lambda x, ct, wrt: state_space_v2_bwd(x, None, ct, wrt=wrt, config=CONFIG),
        lambda x, dot: state_space_v2_jvp(x, None, dot, config=CONFIG),
        case.make(20, jnp.float32),
        jnp.float32,
    )


@pytest.mark.parametrize("algorithm, length", [("fused_chunks", 20), ("steps", 3)])
def test_other_ways_of_the_forward(algorithm, length):
    """One program for all chunks of a head, and single tokens."""
    x = Case("groups", B=1).make(length, jnp.float32)
    found = state_space_v2(*x, config=RecurrenceConfig(**BLOCKS, algorithm=algorithm))
    exact, rounded = (formula(x, SPEC, like(found), dtype)[0] for dtype in (jnp.float64, None))
    check((found, {}), (exact, {}), (rounded, {}), jnp.float32)
