"""Mamba-2's state space on TPU: numbers in the interpreter that finds races, and the real compilers of all TPUs."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives.state_space_v2 import Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.state_space_cases import CASES, SPEC, Case, check_all, differentiable

from .tpu_compiler import TARGETS, by_generation, compile_recurrence
from .tpu_interpreter import interpreted

forward, backward, tangent = (
    kernel_registry.find("state_space_v2" + kind, "pallas", "tpu").implementation for kind in ("", "_bwd", "_jvp")
)
CONFIG = RecurrenceConfig(chunk_size=16, subchunk_size=8)
QUICK = ("packed",)


def quick(name: str, value) -> object:
    return pytest.param(value, id=name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("case", [quick(case.name, case) for case in CASES])
def test_in_the_interpreter(case):
    """Forward, backward and tangent in float32; the last chunk is not full, and tokens of no sequence hold NaN."""
    x = case.make(24, jnp.float32)
    assert forward.supports(SPEC, x, TARGETS["v5e"]) is None
    check_all(
        interpreted(lambda *x: forward(*x, config=CONFIG)),
        lambda x, ct, wrt: interpreted(lambda x, ct: backward(x, None, ct, wrt=wrt, config=CONFIG))(x, ct),
        interpreted(lambda x, dot: tangent(x, None, dot, config=CONFIG)),
        x,
        jnp.float32,
    )


@pytest.mark.slow
def test_in_bfloat16_in_the_interpreter():
    """Only what goes in and out is rounded."""
    x = Case("small", B=1, H=4, G=2).make(20, jnp.bfloat16)
    check_all(
        interpreted(lambda *x: forward(*x, config=CONFIG)),
        lambda x, ct, wrt: interpreted(lambda x, ct: backward(x, None, ct, wrt=wrt, config=CONFIG))(x, ct),
        interpreted(lambda x, dot: tangent(x, None, dot, config=CONFIG)),
        x,
        jnp.bfloat16,
    )


def call(*, heads: int = 8, groups: int = 2, dtype=jnp.bfloat16, sequences: int | None = None) -> Operands:
    """Operands of a layer of Mamba-2 without contents."""
    array, b = jax.ShapeDtypeStruct, 1 if sequences else 2
    tokens = lambda *shape, dtype=dtype: array((b, 1000, *shape), dtype)
    of_head, state = array((1, heads), jnp.float32), array((b, sequences or 1, heads, 64, 128), jnp.float32)
    spans = sequences and array((1, sequences, 2), jnp.int32)
    B, dt = tokens(groups, 128), tokens(heads, dtype=jnp.float32)
    return Operands(tokens(heads, 64), of_head, B, B, dt, of_head, state, spans)


CALLS = {
    "groups": call(),
    "packed": call(sequences=5, groups=1),
    "float32": call(dtype=jnp.float32, groups=8),
}


@by_generation
@pytest.mark.parametrize("name", [quick(name, name) for name in CALLS])
def test_the_compilers_take_them(name, generation):
    x = CALLS[name]
    kernels, ct = (forward, backward, tangent), Outputs(x.x, x.initial_state)
    compile_recurrence(kernels, generation, SPEC, x, ct, differentiable(x))
