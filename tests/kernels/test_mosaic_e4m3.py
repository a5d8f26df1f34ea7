"""flash_attention in e4m3, lowered for a Hopper GPU without one."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import E4M3, greatest_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec
from ejkernel.types import KernelConfig, Target

CONFIGS = [KernelConfig(block_q=q, block_k=k, num_stages=2) for q, k in ((128, 128), (192, 64), (192, 128))]


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX does not transpose a tile of eight bits")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.block_q}x{config.block_k}")
@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128)])
def test_is_lowered(D, V, config):
    x = [jax.ShapeDtypeStruct((1, 500, 2, size), jnp.bfloat16) for size in (D, D, V)]
    spec = FlashAttentionSpec(causal=True, softmax_scale=0.1, precision="e4m3")
    lowered = (
        jax.jit(lambda *x: flash_attention(*x, spec=spec, config=config)).trace(*x).lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("mosaic_gpu_v2") == 2  # one that rounds k and v, and the forward


@pytest.mark.parametrize("tokens", [500, 8192])
@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_precision_asks_for_it(D, V, tokens):
    """The operation with `precision`, in blocks of its own; its gradient is computed of what was not rounded."""
    x = [jax.ShapeDtypeStruct((1, tokens, 2, size), jnp.bfloat16) for size in (D, D, V)]
    attention = partial(ejkernel.lax.flash_attention, causal=True, precision="e4m3")
    lowered = jax.jit(attention).trace(*x).lower(lowering_platforms=("cuda",))
    kernels = 2 if jax.__version_info__ >= (0, 11) else 1  # one that rounds, and the forward
    assert lowered.as_text().count("mosaic_gpu_v2") == kernels
    loss = lambda *x: attention(*x).astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss)).trace(*x).lower(lowering_platforms=("cuda",)).as_text()
    # Short gradients of 64 features are Triton's.
    assert text.count("mosaic_gpu_v2") == kernels + (tokens > 1024 or D > 64)
    explained = ejkernel.explain("flash_attention", *x, causal=True, precision="e4m3", target=Target("cuda"))
    assert explained.config.platform == "pallas" and explained.config.block_k == 128


@pytest.mark.parametrize("features", [64, 128, 192, 256])
def test_sums_of_products_are_in_range(features):
    """The greatest numbers of q and k are e4m3, and of no greater ones of k all sums of products would be float16."""
    q, k, _ = greatest_of(features)
    next_k = k + 2 ** (jnp.floor(jnp.log2(k)) - 3)
    assert [float(jnp.asarray(x, E4M3)) for x in (q, k, next_k)] == [q, k, next_k]
    assert q * k * features <= jnp.finfo(jnp.float16).max < q * next_k * features
