"""Mamba's state space on TPU: numbers in the interpreter that finds races, and the real compilers of all TPUs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives.state_space_v1 import Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_v1_cases import CASES, SPEC, check_all, differentiable

from .tpu_compiler import TARGETS, by_generation, compile_recurrence
from .tpu_interpreter import interpreted

forward, backward, tangent = (
    kernel_registry.find("state_space_v1" + kind, "pallas", "tpu").implementation for kind in ("", "_bwd", "_jvp")
)
CONFIG = RecurrenceConfig(chunk_size=32, block_v=128)


@pytest.mark.parametrize(
    "case, dtype",
    [
        pytest.param(case, dtype, id=f"{case.name}-{dtype.dtype.name}", marks=() if case.ends else pytest.mark.slow)
        for case in CASES
        for dtype in (jnp.float32, jnp.bfloat16)
    ],
)
def test_in_the_interpreter(case, dtype):
    """Forward, backward and tangent; the last chunk is not full, and tokens of no sequence hold NaN."""
    x = replace(case, H=256 if case.B > 1 else 128).make(40, dtype)
    assert forward.supports(SPEC, x, TARGETS["v5e"]) is None
    check_all(
        interpreted(lambda *x: forward(*x, spec=SPEC, config=CONFIG)),
        lambda x, ct, wrt: interpreted(lambda x, ct: backward(x, None, ct, wrt=wrt, spec=SPEC, config=CONFIG))(x, ct),
        interpreted(lambda x, dot: tangent(x, None, dot, spec=SPEC, config=CONFIG)),
        x,
        dtype,
    )


def call(*, channels=1024, numbers=16, dtype=jnp.bfloat16, sequences=None) -> Operands:
    """Operands without contents."""
    b, wide = 1 if sequences else 2, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    tokens = lambda *shape: jax.ShapeDtypeStruct((b, 1000, *shape), dtype)
    of_state, state = tokens(numbers), wide(b, sequences or 1, channels, numbers)
    spans = sequences and jax.ShapeDtypeStruct((1, sequences, 2), jnp.int32)
    A, D, dt = wide(1, channels, numbers), wide(1, channels), wide(b, 1000, channels)
    return Operands(tokens(channels), A, of_state, of_state, dt, D, state, spans)


CALLS = {
    "a layer of Mamba": call(channels=1536),
    "packed": call(sequences=5),
    "float32": call(dtype=jnp.float32),
    "states of 64": call(channels=384, numbers=64),
}


@by_generation
@pytest.mark.parametrize("name", CALLS)
def test_the_compilers_take_them(name, generation):
    x = CALLS[name]
    kernels, ct = (forward, backward, tangent), Outputs(x.x, x.initial_state)
    compile_recurrence(kernels, generation, SPEC, x, ct, differentiable(x))
