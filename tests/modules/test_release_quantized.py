"""quantized_matmul in the call form of the release, as the layers of EasyDeL call it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import modules, quantization
from tests.modules.release import close, mesh_of, random

# What EasyDeL 0.3.0 passes on a CPU or GPU, and on a TPU for small and large batches.
HOW = {
    "default": dict(fuse=True, platform="auto", use_best_config=True),
    "small": dict(fuse=False, platform="xla", use_best_config=True),
    "large": dict(
        **dict(fuse=True, platform="pallas", use_best_config=True, tpu_path="predecode"),
        **dict(allow_dense_fallback=False, strict_fuse=True),
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("of", (dict(bits=8, mode="affine", group_size=16), dict(bits=4, mode="nf4", group_size=32)))
def test_quantized_matmul(how, of):
    """As the layers of EasyDeL call it: weights [K, N] packed with transpose=False."""
    x, w = random(5, 24).astype(jnp.bfloat16), random(24, 64)
    codes, scales, *zeros = quantization.prepack_quantized_weights(w, **of, transpose=False)
    zeros = zeros[0] if zeros else None
    # Weights are rounded to the dtype of x, once.
    dense = np.asarray(quantization.dequantize(codes, scales, zeros, **of).astype(jnp.bfloat16), np.float64)
    found = modules.operations.quantized_matmul(x, codes, scales, zeros, transpose=False, **of, **HOW[how])
    assert found.dtype == jnp.bfloat16
    close(found, np.asarray(x, np.float64) @ dense, 5e-3)
    gradient = jax.grad(lambda x: modules.quantized_matmul(x, codes, scales, zeros, **of, **HOW[how]).sum())(x)
    close(gradient, np.broadcast_to(dense.sum(1), x.shape), 5e-3)


@pytest.mark.parametrize(("rows", "mode", "calls"), ((16, "affine", 1), (16, "nf4", 0), (4096, "affine", 0)))
def test_pallas_on_a_tpu(rows, mode, calls):
    """EasyDeL asks for it with any mode and number of rows; XLA has those that the kernel does not take."""
    array, of = jax.ShapeDtypeStruct, dict(bits=4, mode=mode, group_size=64)
    groups = [array((256, 4), jnp.bfloat16)] * (2 if mode == "affine" else 1)
    call = jax.jit(lambda *a: modules.quantized_matmul(*a, **of, **HOW["large"]))
    traced = call.trace(array((rows, 256), jnp.bfloat16), array((256, 32), jnp.uint32), *groups)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call(") == calls


def test_quantized_matmul_over_the_contracted_features():
    """`axis="col"`, which is transpose=True: weights [N, K]."""
    x, w, of = random(5, 64), random(24, 64), dict(bits=4, mode="affine", group_size=32)
    packed = quantization.quantize(w, axis="col", **of)
    dense = np.asarray(quantization.dequantize(*packed, **of), np.float64)
    for how in (dict(axis="col"), dict(transpose=True)):
        close(modules.quantized_matmul(x, *packed, **of, **how), np.asarray(x, np.float64) @ dense.T)


def test_quantized_matmul_over_a_mesh():
    """Columns over one axis, rows over the other; contracted features in shard_map, with a psum."""
    x, w, of = random(4, 24), random(24, 64), dict(bits=4, mode="nf4", group_size=32)
    codes, scales = quantization.prepack_quantized_weights(w, **of, transpose=False)
    wanted = np.asarray(x, np.float64) @ np.asarray(quantization.dequantize(codes, scales, **of), np.float64)
    mesh = mesh_of(("dp", 2), ("tp", 2))
    specs = (P("dp"), P(None, "tp"), P(None, "tp"))
    close(modules.quantized_matmul(x, codes, scales, **of, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp")), wanted)
    local = lambda *a: jax.lax.psum(modules.quantized_matmul(*a, **of, fuse=True, platform="auto"), "tp")
    specs = (P(None, "tp"), P("tp"), P("tp"))
    close(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(x, codes, scales), wanted)
