"""The gated delta rule in Triton: the kernels' masks and indices, by the interpreter, against float64."""

import jax.numpy as jnp
import pytest

from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.gated_delta_cases import CASES, check, check_all, formula, like

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.gated_delta_rule import (  # noqa: E402
    gated_delta_rule,
    gated_delta_rule_bwd,
    gated_delta_rule_jvp,
)

from . import interpreter  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)


@pytest.mark.parametrize("chunk", (16, pytest.param(32, marks=pytest.mark.slow)))
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[] if case.ends else pytest.mark.slow) for case in CASES]
)
def test_in_the_interpreter(case, chunk):
    """Forward, backward and tangent in float32; tokens of no sequence hold NaN."""
    config = RecurrenceConfig(chunk_size=chunk, block_v=32)
    check_all(
        lambda *x, spec: gated_delta_rule(*x, spec=spec, config=config),
        lambda x, ct, wrt, spec: gated_delta_rule_bwd(x, None, ct, wrt=wrt, spec=spec, config=config),
        lambda x, dot, spec: gated_delta_rule_jvp(x, None, dot, spec=spec, config=config),
        *case.make(40, jnp.float32),
        jnp.float32,
    )


@pytest.mark.parametrize("length", (1, 3))
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES if not c.ends])
def test_steps_in_the_interpreter(case, length):
    """The forward token by token, with blocks of columns that the values do not fill."""
    x, spec = case.make(length, jnp.float32)
    config = RecurrenceConfig(block_v=32, algorithm="steps")
    outputs = gated_delta_rule(*x, spec=spec, config=config)
    exact, rounded = (formula(x, spec, like(outputs), dtype)[0] for dtype in (jnp.float64, None))
    check((outputs, {}), (exact, {}), (rounded, {}), jnp.float32)
