"""flash_attention on TPU: numbers, in the interpreter that simulates the chip, finds races and poisons fresh memory."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu.flash_attention import (
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
)
from ejkernel.types import KernelConfig
from tests.gpu.attention_cases import CASES, check_all, derivatives, differentiable, like, poisoned

LENGTH = 200
CONFIG = KernelConfig(block_q=128, block_k=256, num_stages=2)
# Those that a normal run has time for.
QUICK = {
    ("bias of pairs, capped", "float32"),
    ("segments, causal, bias", "bfloat16"),
    ("sinks, more queries", "float32"),
    ("packed, causal", "float32"),
    ("large logits", "bfloat16"),
}


def interpreted(f):
    """f, jitted, in the interpreter."""

    def run(*args):
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
            return jax.jit(f)(*args)

    return run


CALLS = [
    pytest.param(
        case,
        dtype,
        marks=() if (case.name, dtype) in QUICK else pytest.mark.slow,
        id=f"{case.name}, {dtype}",
    )
    for case in CASES
    for dtype in ("float32", "bfloat16")
    if not case.spec.dropout_rate
]


@pytest.mark.parametrize("case, dtype", CALLS)
def test_in_the_interpreter(case, dtype):
    """Forward, backward and tangent, keys that no query sees holding NaN."""
    x, spec = case.make(LENGTH, jnp.dtype(dtype))
    wrt = differentiable(x)
    tangents = x._replace(**{name: like(getattr(x, name), 1) if name in wrt else None for name in x._fields})

    @interpreted
    def run(x, tangents, cotangents):
        outputs = flash_attention(*x, spec=spec, config=CONFIG)
        gradients = flash_attention_bwd(x, outputs, cotangents, wrt=wrt, spec=spec, config=CONFIG)
        moved = flash_attention_jvp(x, outputs, tangents, spec=spec, config=CONFIG)
        return outputs, dict(zip(wrt, gradients, strict=True)), moved

    cotangents = like(jax.eval_shape(functools.partial(flash_attention, spec=spec, config=CONFIG), *x), 2)
    oracle, reference = (
        derivatives(x, spec, cotangents, tangents._asdict(), t) for t in (jnp.float64, jnp.dtype(dtype))
    )
    check_all(run(poisoned(x, spec), tangents, cotangents), oracle, reference)
