"""native_sparse_attention in Triton, compiled for GPUs without having them: heuristic configs fit."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from ejkernel.kernels._target import gpu_target, lowering_for
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import native_sparse_attention as kernels
from ejkernel.kernels._triton.native_sparse_attention import configs
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs

from . import compiler
from .test_triton_compile import KINDS

MOST_SPILLED = 512
SHAPES = {
    "heads of 128": (64, 4, 128, 128, 16, 64),
    "latent heads": (12, 4, 192, 128, 4, 128),
    "heads of 256": (12, 4, 256, 256, 4, 64),
    "one group of 128 heads": (128, 1, 192, 128, 3, 64),
}
NAMES = ("native_sparse_attention", "native_sparse_attention_bwd", "native_sparse_attention_jvp")


def cases():
    """Two shapes on two generations, and the rest as slow tests."""
    for target in ("sm_90", "sm_100", "sm_80", "sm_120"):
        for shape in SHAPES:
            # In float32 registers spill, as the kernel's `supports` says.
            for dtype in ("bfloat16",) if shape == "one group of 128 heads" else ("bfloat16", "float32"):
                often = shape in ("heads of 128", "one group of 128 heads") and dtype == "bfloat16"
                usual = often and target in ("sm_90", "sm_100")
                marks = () if usual else pytest.mark.slow
                yield pytest.param(target, SHAPES[shape], dtype, id=f"{target}-{shape}-{dtype}", marks=marks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target, shape, dtype", cases())
def test_the_first_config(target, shape, dtype, name, monkeypatch):
    """Its shared memory is within the estimate and the limit, and few registers spill."""
    h, g, d, e, n, size = shape
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    x = Operands(array(1, 512, h, d), array(1, 512, g, d), array(1, 512, g, e), array(1, 512, g, n, dtype=jnp.int32))
    outputs, spec = (
        Outputs(array(1, 512, h, e), array(1, h, 512, dtype=jnp.float32)),
        NativeSparseAttentionSpec(size, 0.1),
    )

    def call(config):
        a, out = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), (x, outputs))
        if name.endswith("_bwd"):
            return kernels.native_sparse_attention_bwd(a, out, out, wrt=("q", "k", "v"), spec=spec, config=config)
        if name.endswith("_jvp"):
            moving = a._replace(block_indices=None)
            return kernels.native_sparse_attention_jvp(a, out, moving, spec=spec, config=config)
        return kernels.native_sparse_attention(*a, spec=spec, config=config)

    with lowering_for(KINDS[target]):
        supports = getattr(kernels, name.replace("native_sparse_attention", "supports"))
        if reason := supports(spec, x, gpu_target()):
            spills, few = (
                name.endswith("_jvp") and dtype == "float32" and max(d, e) > 128,
                target == "sm_120" and d > 128,
            )
            assert (spills and "more spill registers" in reason) or (few and "bytes of shared memory" in reason)
            return
        config = configs.space(name, x, spec, gpu_target())[0]
        said, limit = configs.shared_memory(name, x, config), _launch.shared_memory_limit(gpu_target())
        launches = compiler.launches(monkeypatch, _launch, partial(call, config))
    assert launches and said <= limit
    for launch in launches:
        binary = compiler.binary(launch, compiler.TARGETS[target])
        assert binary.shared <= said, launch
        assert binary.spilled <= MOST_SPILLED, launch
