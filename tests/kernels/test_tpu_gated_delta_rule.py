"""The gated delta rule on TPU: numbers in the interpreter that finds races, and the real compilers of all TPUs."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec, Operands, Outputs
from ejkernel.types.recurrence import RecurrenceConfig
from tests.gpu.gated_delta_cases import CASES, Case, check_all, differentiable

from .tpu_compiler import TARGETS, by_generation, compile_recurrence
from .tpu_interpreter import interpreted

forward, backward, tangent = (
    kernel_registry.find("gated_delta_rule" + kind, "pallas", "tpu").implementation for kind in ("", "_bwd", "_jvp")
)
CONFIG = RecurrenceConfig(chunk_size=16, subchunk_size=8)
QUICK = ("packed", "similar keys")


def quick(name: str, value) -> object:
    return pytest.param(value, id=name, marks=() if name in QUICK else pytest.mark.slow)


def check(case: Case, length: int, dtype, config=CONFIG) -> None:
    """Forward, backward and tangent by the interpreter against the formula."""
    x, spec = case.make(length, dtype)
    assert forward.supports(spec, x, TARGETS["v5e"]) is None
    check_all(
        lambda *x, spec: interpreted(lambda *x: forward(*x, spec=spec, config=config))(*x),
        lambda x, ct, wrt, spec: interpreted(lambda x, ct: backward(x, None, ct, wrt=wrt, spec=spec, config=config))(
            x, ct
        ),
        lambda x, dot, spec: interpreted(lambda x, dot: tangent(x, None, dot, spec=spec, config=config))(x, dot),
        x,
        spec,
        dtype,
    )


@pytest.mark.parametrize("case", [quick(case.name, case) for case in CASES])
def test_in_the_interpreter(case):
    """In float32; the last chunk is not full, and tokens of no sequence hold NaN."""
    check(case, 24, jnp.float32)


@pytest.mark.slow
def test_in_bfloat16_in_the_interpreter():
    """Only what goes in and out is rounded."""
    check(Case("small", B=1, H=4, G=2), 20, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("subchunk_size", (24, 32))
def test_blocks_that_are_no_power_of_two(subchunk_size):
    config = RecurrenceConfig(chunk_size=subchunk_size, subchunk_size=subchunk_size)
    check(Case("values are replaced", all_replaced=True, decay=0.1), 40, jnp.float32, config)


def call(*, heads: int = 8, groups: int = 2, dtype=jnp.bfloat16, sequences: int | None = None, gated=True) -> Operands:
    """Operands of a layer of Qwen3-Next without contents."""
    array, b = jax.ShapeDtypeStruct, 1 if sequences else 2
    tokens = lambda *shape, dtype=dtype: array((b, 1000, *shape), dtype)
    state = array((b, sequences or 1, heads, 128, 128), jnp.float32)
    spans, g = sequences and array((1, sequences, 2), jnp.int32), tokens(heads, dtype=jnp.float32) if gated else None
    keys = tokens(groups, 128)
    return Operands(keys, keys, tokens(heads, 128), tokens(heads), g, state, spans)


CALLS = {
    "groups": call(),
    "packed": call(sequences=5, groups=1),
    "float32": call(dtype=jnp.float32, groups=8),
    "no decay": call(gated=False),
}
SPEC = GatedDeltaRuleSpec(softmax_scale=128**-0.5)


@by_generation
@pytest.mark.parametrize("name", [quick(name, name) for name in CALLS])
def test_the_compilers_take_them(name, generation):
    x = CALLS[name]
    kernels, ct = (forward, backward, tangent), Outputs(x.v, x.initial_state)
    compile_recurrence(kernels, generation, SPEC, x, ct, differentiable(x))
