"""native_sparse_decode_attention in Triton, compiled without GPUs: all configs fit, and few registers spill."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import native_sparse_decode_attention as implementation
from ejkernel.kernels._triton.native_sparse_decode_attention import configs, kernels
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands

from . import compiler
from .configs_of_a_space import heuristic_and_others
from .test_triton_compile import KINDS

MOST_SPILLED = 256
SHAPES = {
    "64/4 heads of 128, 64k": (65536, 64, 4, 128),
    "8/8 heads of 64, 4k": (4096, 8, 8, 64),
    "64/1 heads of 192, 16k": (16384, 64, 1, 192),
}


@heuristic_and_others
@pytest.mark.parametrize("of_means", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "target", ("sm_90", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_80", "sm_100", "sm_120")))
)
def test_every_config(target, shape, dtype, of_means, which, monkeypatch):
    (t, h, g, d), spec = shape, NativeSparseDecodeAttentionSpec(64, 0.1, 512)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    k, means, gate, of = (
        array(32, t, g, d),
        array(32, t // 64, g, d, dtype=of_means),
        array(32, h),
        partial(array, dtype=jnp.int32),
    )
    x = Operands(array(32, h, d), k, k, of(32), means, means, gate, gate, gate, of(1, 16))
    with lowering_for(KINDS[target]):
        reason = implementation.supports(spec, x, gpu_target())
        if dtype == "float32" and h // g > 32:
            assert "up to 32 in float32" in reason
            return
        assert reason is None
        for config in configs.space("native_sparse_decode_attention", x, spec, gpu_target())[which]:
            run = partial(kernels.native_sparse_decode_attention, spec=spec, config=config)
            call = lambda run=run: jax.eval_shape(run, *x)
            said = configs.shared_memory("", x, config)
            assert said <= _launch.shared_memory_limit(gpu_target())
            for launch in compiler.launches(monkeypatch, _launch, call):
                binary = compiler.binary(launch, compiler.TARGETS[target])
                print(target, shape, dtype, config, launch, binary.shared, said, binary.registers, binary.spilled)
                chooses = launch.kernel.__name__ == "selection_kernel"  # its config is its own
                limit = _launch.shared_memory_limit(gpu_target()) if chooses else said
                assert binary.shared <= limit, (config, launch)
                assert binary.spilled <= MOST_SPILLED, (config, launch)
