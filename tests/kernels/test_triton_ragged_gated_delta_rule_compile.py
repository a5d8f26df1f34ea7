"""ragged_gated_delta_rule in Triton, compiled without GPUs: all configs fit, and few registers spill."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import ragged_gated_delta_rule as implementation
from ejkernel.kernels._triton.ragged_gated_delta_rule import configs, kernels
from ejkernel.primitives.gated_delta_rule import GatedDeltaRuleSpec
from ejkernel.primitives.ragged_gated_delta_rule import Operands

from . import compiler
from .configs_of_a_space import heuristic_and_others
from .test_triton_compile import KINDS

MOST_SPILLED = 512
SHAPES = {"Qwen3-Next": (16, 32, 128, 128), "wide values": (2, 4, 128, 256), "wide keys": (2, 4, 192, 64)}


@heuristic_and_others
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "sm_100", "sm_120", "gfx942")))
)
def test_every_config(target, shape, dtype, which, monkeypatch):
    (g, h, d, e), spec = shape, GatedDeltaRuleSpec(0.1)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((1, *shape), dtype)
    q, gate = array(512, g, d), array(512, h, dtype="float32")
    tables = array(33, dtype=jnp.int32), array(32, dtype=jnp.int32)
    x = Operands(q, q, array(512, h, e), gate, array(64, h, d, e, dtype="float32"), *tables, gate)
    with lowering_for(KINDS[target]):
        reason = implementation.supports(spec, x, gpu_target())
        if dtype == "float32" and d > 128:
            assert "up to 128 in float32" in reason
            return
        assert reason is None or target == "gfx942"
        for config in configs.space("ragged_gated_delta_rule", x, spec, gpu_target())[which]:
            call = lambda config=config: jax.eval_shape(
                lambda *x: kernels.ragged_gated_delta_rule(*x, spec=spec, config=config), *x
            )
            for launch in compiler.launches(monkeypatch, _launch, call):
                binary = compiler.binary(launch, compiler.TARGETS[target])
                print(target, shape, dtype, config, launch, binary.shared, binary.registers, binary.spilled)
                assert binary.shared <= _launch.shared_memory_limit(gpu_target()), (config, launch)
                assert (binary.spilled or 0) <= MOST_SPILLED, (config, launch)
