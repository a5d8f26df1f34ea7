"""native_sparse_blocks in Triton, compiled for GPUs without having them: all configs fit, and few registers spill."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import native_sparse_blocks as implementation
from ejkernel.kernels._triton.native_sparse_blocks import configs, kernels
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands

from . import compiler
from .configs_of_a_space import heuristic_and_others
from .test_triton_compile import KINDS

MOST_SPILLED = 512
SHAPES = {
    "64/4 heads of 128, 16k": (16384, 64, 4, 128),
    "64/4 heads of 128, 1M": (2**20, 64, 4, 128),
    "8/8 heads of 64, 4k": (4096, 8, 8, 64),
    "64/1 heads of 192, 16k": (16384, 64, 1, 192),
}


@heuristic_and_others
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "sm_100", "sm_120")))
)
def test_every_config(target, shape, dtype, which, monkeypatch):
    (t, h, g, d), spec = shape, NativeSparseBlocksSpec(64, 0.1)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    x = Operands(array(1, t, h, d), array(1, t, g, d), array(1, 16, dtype=jnp.int32))
    with lowering_for(KINDS[target]):
        reason = implementation.supports(spec, x, gpu_target())
        if dtype == "float32" and d > 128:
            assert "more spill registers" in reason
            return
        assert reason is None
        for config in configs.space("native_sparse_blocks", x, spec, gpu_target())[which]:
            call = lambda config=config: jax.eval_shape(
                lambda x: kernels.native_sparse_blocks(*x, spec=spec, config=config), x
            )
            said = configs.shared_memory("", x, config)
            assert said <= _launch.shared_memory_limit(gpu_target())
            for launch in compiler.launches(monkeypatch, _launch, call):
                binary = compiler.binary(launch, compiler.TARGETS[target])
                print(target, shape, dtype, config, binary)
                assert binary.shared <= said, (config, launch)
                assert binary.spilled <= MOST_SPILLED, (config, launch)
