"""flash_attention in Triton: every kernel's masks and indices, by the interpreter, against the formula in float64."""

import jax.numpy as jnp
import pytest

from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CASES, check_near, differentiable, like, poisoned

triton = pytest.importorskip("triton")
from ejkernel.kernels._triton import _launch  # noqa: E402
from ejkernel.kernels._triton.flash_attention import (  # noqa: E402
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)

from . import interpreter  # noqa: E402

LENGTH = 40
CONFIG = KernelConfig(block_q=16, block_k=32)


ALWAYS = ("causal", "grouped heads", "packed, causal")  # the interpreter takes ten seconds and more a case


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in ALWAYS else pytest.mark.slow) for case in CASES],
)
def test_in_the_interpreter(case, monkeypatch):
    """Forward, backward and tangent of small float32 calls, keys that no query sees holding NaN."""
    monkeypatch.setattr(_launch, "launch", interpreter.launch)
    x, spec = case.make(LENGTH, jnp.float32)
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})
    outputs = flash_attention(*poisoned(x, spec), spec=spec, config=CONFIG)
    cotangents = like(outputs, 2)
    gradients = flash_attention_bwd(poisoned(x, spec), outputs, cotangents, wrt=wrt, spec=spec, config=CONFIG)
    moved = flash_attention_jvp(poisoned(x, spec), outputs, tangents, spec=spec, config=CONFIG)
    results = outputs, dict(zip(wrt, gradients, strict=True)), moved
    check_near(results, x, spec, cotangents, tangents._asdict(), jnp.float32)
