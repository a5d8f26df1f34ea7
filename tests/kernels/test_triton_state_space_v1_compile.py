"""Mamba's state space in Triton, compiled without GPUs: all configs fit, and few registers spill."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch, state_space_v1
from ejkernel.kernels._triton.state_space_v1 import backward, configs, forward, tangent
from ejkernel.primitives.state_space_v1 import Operands, Outputs, StateSpaceSpec

from . import compiler
from .test_triton_compile import KINDS

MOST_SPILLED = 512
WRT = ("x", "A", "B", "C", "dt", "D", "initial_state")
KERNELS = {
    "state_space_v1": lambda x, config: forward.state_space_v1(*x, config=config),
    "state_space_v1_bwd": lambda x, config: backward.state_space_v1_bwd(
        x, None, Outputs(x.x, x.initial_state), wrt=WRT, config=config
    ),
    "state_space_v1_jvp": lambda x, config: tangent.state_space_v1_jvp(x, None, x, config=config),
}


@pytest.mark.parametrize("numbers", (16, pytest.param(32, marks=pytest.mark.slow), 128))
@pytest.mark.parametrize("operation, tokens", [*((operation, 250) for operation in KERNELS), ("state_space_v1", 1)])
@pytest.mark.parametrize(
    "target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "sm_100", "sm_120", "gfx942")))
)
def test_every_config(target, operation, tokens, numbers, monkeypatch):
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, *shape), dtype)
    wide = lambda *shape: array(*shape, dtype=jnp.float32)
    of_state, A, D = array(tokens, numbers), wide(640, numbers), wide(640)
    x = Operands(array(tokens, 640), A, of_state, of_state, wide(tokens, 640), D, wide(1, 640, numbers))
    with lowering_for(KINDS[target]):
        assert state_space_v1.supports(StateSpaceSpec(), x, gpu_target()) is None or target == "gfx942"
        for config in configs.space(operation, x, StateSpaceSpec(), gpu_target()):
            call = lambda config=config: jax.eval_shape(lambda x: KERNELS[operation](x, config), x)
            for launch in compiler.launches(monkeypatch, _launch, call):
                binary = compiler.binary(launch, compiler.TARGETS[target])
                print(target, operation, numbers, launch, binary.shared, binary.registers, binary.spilled)
                assert binary.shared <= configs.shared_memory(operation, x, config), (config, launch)
                assert (binary.spilled or 0) <= MOST_SPILLED, (config, launch)
