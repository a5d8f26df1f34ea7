"""flash_attention in e4m3, lowered for a Hopper GPU without one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels._pallas.gpu.flash_attention.quantized import (
    E4M3,
    greatest_of,
    hadamard_size,
    rotated,
    rotation,
    unit_of,
)
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


@pytest.mark.parametrize("tokens", [504, 8192])
@pytest.mark.parametrize("D, V", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_precision_asks_for_it(D, V, tokens):
    """The operation with `precision`, with its own blocks; its gradient is computed from unrounded arrays."""
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
    """The largest q and k are representable in e4m3; with larger k, sums of products would overflow float16."""
    q, k, _ = greatest_of(features)
    next_k = k + 2 ** (jnp.floor(jnp.log2(k)) - 3)
    assert [float(jnp.asarray(x, E4M3)) for x in (q, k, next_k)] == [q, k, next_k]
    assert q * k * features <= jnp.finfo(jnp.float16).max < q * next_k * features


@pytest.mark.parametrize("features", [64, 128, 192, 256])
def test_rotation(features):
    """n·(q M)·(k M) = q·k; a row that a Hadamard matrix alone would put into one feature is spread."""
    n, matrix = hadamard_size(features), rotation(features)
    np.testing.assert_array_equal(n * matrix @ matrix.T, np.eye(features))
    np.testing.assert_array_equal(matrix.astype(jnp.bfloat16), matrix)
    assert np.abs(np.ones(features) @ matrix).max() <= 2 / np.sqrt(n)


@pytest.mark.parametrize("features", [64, 128, 256])
def test_outliers(features):
    """One number in a hundred is ten times as large: with 4096 keys, the rotation reduces o's error to 0.4 of it."""
    errors = np.array([errors_beside_outliers(np.random.default_rng(seed), features) for seed in range(4)])
    plain, of_rotated = errors.mean(0)
    assert of_rotated <= 0.4 * plain


def errors_beside_outliers(rng, features):
    """‖o − exact‖ / ‖exact‖ without and with the rotation, of a tile of queries and 32 blocks of keys."""
    of_outliers = lambda n: rng.standard_normal((n, features)) * np.where(rng.random((n, features)) < 0.01, 10, 1)
    x = [of_outliers(n).astype(jnp.bfloat16) for n in (128, 4096, 4096)]
    exact = attend(*x)
    o = attend(*map(in_e4m3, x, greatest_of(features)))
    x_rotated = *map(rotated, x[:2]), x[2]
    o_rotated = attend(*map(in_e4m3, x_rotated, greatest_of(features)), hadamard_size(features))
    return [np.linalg.norm(y - exact) / np.linalg.norm(exact) for y in (o, o_rotated)]


def attend(q, k, v, factor=1):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    return np.asarray(jax.nn.softmax(factor * q @ k.T / np.sqrt(q.shape[1]))) @ v


def in_e4m3(x, most):
    """Rounded in blocks of 128 rows, each with its scale."""
    blocks = np.asarray(x, np.float32).reshape(-1, 128, x.shape[1])
    unit = np.asarray(unit_of(np.abs(blocks).max((1, 2), keepdims=True), most))
    return ((blocks / unit).astype(E4M3).astype(np.float32) * unit).reshape(x.shape)
