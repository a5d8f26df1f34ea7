"""native_sparse_attention in Mosaic GPU on a Hopper GPU, with Triton's derivatives, against float64; unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

from .test_native_sparse_attention import call
from .test_native_sparse_attention import check as check_of

pytestmark = pytest.mark.gpu
check = partial(check_of, forward="pallas")


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("scale", (1.0, 30.0, 1e-3), ids=("normal", "large logits", "uniform rows"))
def test_dtypes(dtype, scale):
    check(dtype=dtype, scale=scale)


@pytest.mark.parametrize("h, g", [(16, 1), (64, 4), (64, 2), (64, 1)])
@pytest.mark.parametrize("d, e", [(64, 64), (128, 128), (192, 128), (64, 128)])
def test_heads_and_features(h, g, d, e):
    check(h=h, g=g, d=d, e=e)


@pytest.mark.parametrize("size, n", [(64, 1), (64, 16), (128, 2), (192, 2)])
def test_blocks(size, n):
    check(s=500, t=700, size=size, n=n)


@pytest.mark.parametrize("s, t", [(64, 300), (300, 100), (257, 257), (100, 1), (1200, 1203)])
def test_lengths(s, t):
    check(s=s, t=t)


@pytest.mark.parametrize("together", (1, 7, 16, 64))
def test_neighbours_with_the_same_blocks(together):
    """Blocks that all queries of a warpgroup list, some of them, and none."""
    (q, k, v), *_ = call(s=600, t=600, h=64, g=4, d=128, e=128)
    lists = np.random.default_rng(1).integers(0, 10, (2, -(-600 // together), 4, 5))
    lists = jnp.asarray(np.repeat(lists, together, 1)[:, :600], jnp.int32)
    run = lambda **options: ejkernel.lax.native_sparse_attention(q, k, v, block_indices=lists, **options)
    found, wanted = (np.asarray(run(platform=platform), np.float32) for platform in ("pallas", "xla"))
    assert np.linalg.norm(found - wanted) < 4e-3 * np.linalg.norm(wanted)


def test_every_config():
    x, lists, *_ = call(h=64, g=4, d=128, e=128)
    kernel = ejkernel.modules.NativeSparseAttention()
    given = dict(q=x[0], k=x[1], v=x[2], block_indices=lists, platform="pallas")
    configs = kernel.config_space(ejkernel.ops.Invocation(kernel=kernel, args=(), kwargs=given))
    found = [ejkernel.lax.native_sparse_attention(**given, config=config) for config in configs]
    for a in found[1:]:
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(found[0], np.float32), atol=0.02)
    assert {config.block_q for config in configs} == {128, 192}


@pytest.mark.parametrize("t", (500, 507))
def test_invisible_keys_may_be_nan(t):
    """Keys after the last query's, in the middle of a block, and blocks that no list has."""
    (q, k, v), *_ = call(s=300, t=t)
    lists = jnp.asarray(np.random.default_rng(0).choice([0, 2, 5, 7, -1], (2, 300, 2, 3)), jnp.int32)
    lists = lists.at[:, 0].set(jnp.array([0, 2, 5]))
    poison = lambda a: a.at[:, 64:128].set(jnp.nan).at[:, 192:320].set(jnp.nan).at[:, 384:448].set(jnp.nan)
    run = jax.jit(partial(ejkernel.lax.native_sparse_attention, block_indices=lists, platform="pallas"))
    np.testing.assert_array_equal(run(q, poison(k), poison(v)), run(q, k, v))


def test_reruns_give_the_same_bits():
    (q, k, v), lists, *_ = call(s=1000, t=1000)
    run = jax.jit(partial(ejkernel.lax.native_sparse_attention, block_indices=lists, platform="pallas"))
    np.testing.assert_array_equal(run(q, k, v), run(q, k, v))
