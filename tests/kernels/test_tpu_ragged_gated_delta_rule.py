"""ragged_gated_delta_rule on TPU: in the interpreter that simulates the chip, and its compilation."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.tpu.ragged_gated_delta_rule import ragged_gated_delta_rule, space, supports
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.ragged_gated_delta_rule import Operands
from ejkernel.types.recurrence import RecurrenceConfig

from . import ragged_states
from .configs_of_a_space import heuristic_and_others
from .tpu_compiler import TARGETS, by_generation, compiled
from .tpu_interpreter import interpreted

CALLS = {name: call for name, call in ragged_states.CALLS.items() if name != "decode alone"}
CONFIG = RecurrenceConfig(chunk_size=16, subchunk_size=8)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype):
    x, spec = ragged_states.operands(dtype, **call)
    found = interpreted(lambda x: ragged_gated_delta_rule(*x, spec=spec, config=CONFIG))(x)
    ragged_states.check(*found, x, spec, TOLERANCE[dtype])


def test_as_many_sequences_as_tokens_are_left_to_xla():
    x, spec = ragged_states.operands("float32", **ragged_states.CALLS["decode alone"])
    assert "8 tokens of 8 sequences" in supports(spec, x, TARGETS["v5e"])


SHAPES = {"64 sequences of 4096 tokens": (4096, 64, 256), "one of 8192": (8192, 1, 64)}


@by_generation
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@heuristic_and_others
def test_compiles(shape, generation, which):
    pytest.importorskip("libtpu")
    (t, n, p), (g, h, d), spec = shape, (16, 32, 128), GatedDeltaRuleSpec(0.1)
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, *shape), dtype)
    q, gate = array(t, g, d), array(t, h, dtype=jnp.float32)
    tables = array(n + 1, dtype=jnp.int32), array(n, dtype=jnp.int32)
    x = Operands(q, q, array(t, h, d), gate, array(p, h, d, d, dtype=jnp.float32), *tables, gate)
    assert supports(spec, x, TARGETS[generation]) is None
    for config in space(spec, x, TARGETS[generation])[which]:
        compiled(lambda *x, config=config: ragged_gated_delta_rule(*x, spec=spec, config=config), generation, *x)
