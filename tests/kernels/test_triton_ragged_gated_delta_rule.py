"""ragged_gated_delta_rule in Triton: by the interpreter, beside the formula in float64."""

import pytest

from ejkernel.types.recurrence import RecurrenceConfig

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.ragged_gated_delta_rule import ragged_gated_delta_rule  # noqa: E402

from . import interpreter, ragged_states  # noqa: E402

CALLS = ragged_states.CALLS


@pytest.mark.parametrize("dtype, tolerance", (("float32", 2e-5), ("bfloat16", 3e-2), ("float16", 4e-3)))
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = ragged_states.operands(dtype, **call)
    found = ragged_gated_delta_rule(*x, spec=spec, config=RecurrenceConfig(chunk_size=16, block_v=32))
    ragged_states.check(*found, x, spec, tolerance)
