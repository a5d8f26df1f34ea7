"""flash_attention in e4m3 without a GPU: how v is laid out, and that the kernel is lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import quantize
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig

CONFIG = KernelConfig(block_q=128, block_k=128, num_stages=2, algorithm="e4m3")


def test_keys_of_v_come_in_the_order_of_the_weights():
    q, k, v = (jnp.asarray(np.random.default_rng(0).standard_normal((2, 40, heads, 64))) for heads in (4, 2, 2))
    (q8, k8, v8), scales = quantize(q, k, v)
    assert (q8.shape, k8.shape, v8.shape) == ((2, 40, 4, 64), (2, 128, 2, 64), (2, 2, 64, 128))
    thread, n = np.divmod(np.arange(128) % 16, 4)
    keys = np.arange(128) // 16 * 16 + 2 * thread + np.array([0, 1, 8, 9])[n]
    v8 = np.asarray(v8.astype(jnp.float32))[..., keys < 40] * scales.values[:, ::2, None, None]
    expected = np.asarray(v)[:, keys[keys < 40]].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(v8, expected, rtol=2**-4, atol=1e-2)


@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128)])
def test_is_lowered(D, V):
    x = [jax.ShapeDtypeStruct((1, 500, 2, size), jnp.bfloat16) for size in (D, D, V)]
    spec = FlashAttentionSpec(causal=True, softmax_scale=0.1)
    lowered = (
        jax.jit(lambda *x: flash_attention(*x, spec=spec, config=CONFIG)).trace(*x).lower(lowering_platforms=("cuda",))
    )
    assert "mosaic_gpu_v2" in lowered.as_text()
