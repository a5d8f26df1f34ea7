"""native_sparse_blocks in Triton on a GPU: every list is right by scores in float64, up to the rounding of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton.native_sparse_blocks import configs
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")
# A logit is as exact as 17 bits, and a score as the differences of logits, which are below 16.
ROUNDING = 2e-4
CALLS = {
    "the shape of its paper": dict(s=4096, h=64, g=4, d=128, n=16),
    "groups of one head": dict(b=2, s=700, h=6, g=6, d=64, n=5, size=16),
    "groups of 5 heads": dict(s=900, h=40, g=8, d=80, n=8, size=32),
    "one group of 64": dict(s=500, h=64, g=1, d=64, n=7, size=16),
    "24 features": dict(s=500, h=4, g=2, d=24, n=6, size=16),
    "fewer queries than keys": dict(b=2, s=37, t=5000, h=16, g=1, d=64, n=12),
    "more queries than keys": dict(s=200, t=140, h=8, g=2, d=64, n=4, size=16),
    "16,384 blocks": dict(s=40, t=2**18, h=16, g=1, d=64, n=16, size=16),
    "packed": dict(s=3000, h=16, g=2, d=64, n=6, cuts=(0, 5, 5, 1700, 1777, 3000)),
    "a part is packed": dict(s=3000, h=16, g=2, d=64, n=6, cuts=(130, 700, 2900)),
    "equal keys": dict(s=900, h=8, g=2, d=64, n=6, size=16, equal=True),
}


def arrays(dtype, s, h, g, d, b=1, t=None, equal=False, **_):
    """q and k; features of k are of different sizes, so that scores of a query are too."""
    rng, t = np.random.default_rng(0), t or s
    q, k = rng.standard_normal((b, s, h, d)), rng.standard_normal((b, 1 if equal else t, g, d)) * 2
    return tuple(jnp.asarray(x, dtype) for x in (q, np.broadcast_to(k, (b, t, g, d))))


def scores(q, k, size):
    """The scores [g, blocks] of one query [h, d] for the blocks that ended with its keys [t, g, d], in float64."""
    blocks = len(k) // size
    means = k[: blocks * size].reshape(blocks, size, *k.shape[1:]).mean(1)
    logits = np.einsum("grd,xgd->grx", q.reshape(k.shape[1], -1, q.shape[-1]), means) * q.shape[-1] ** -0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    return (weights / weights.sum(-1, keepdims=True)).sum(1)


def check(lists, q, k, size, cuts=None, queries=150):
    """Lists are judged one by one, of `queries` queries at most."""
    q, k, lists = (np.asarray(x).astype(np.float64 if x.dtype != jnp.int32 else np.int32) for x in (q, k, lists))
    (batch, s), t, count = q.shape[:2], k.shape[1], lists.shape[-1]
    for b in range(batch):
        for i in np.unique(np.linspace(0, s - 1, queries).astype(int)):
            if cuts is None:
                first, place = 0, i + t - s
            else:
                owner = np.searchsorted(cuts, i, "right") - 1
                first = cuts[max(owner, 0)]
                place = i - first if 0 <= owner < len(cuts) - 1 else -1
            if place < 0:
                assert (lists[b, i] == -1).all()
                continue
            own = place // size
            for listed, score in zip(lists[b, i], scores(q[b, i], k[b, first : first + place + 1], size), strict=True):
                judge(listed, score[1:own], own, count)


def judge(listed, score, own, count):
    """A list has the own block, the first, and the best of those between, whose scores are given, in their order."""
    head = [own, 0 if own > 0 else -1][:count]
    taken = listed[2:] - 1
    assert listed[:2].tolist() == head
    number = min(len(score), max(0, count - 2))
    assert (taken[number:] == -2).all() and len(set(taken[:number])) == number
    assert all(0 <= x < len(score) for x in taken[:number])
    best = np.sort(score)[::-1][:number]
    np.testing.assert_allclose(score[taken[:number]], best, rtol=ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_lists(call, dtype):
    (q, k), size = arrays(dtype, **call), call.get("size", 64)
    cuts = None if "cuts" not in call else np.asarray(call["cuts"], np.int32)
    given = dict(block_counts=call["n"], block_size=size, cu_seqlens=cuts)
    assert "triton/gpu with" in str(ejkernel.explain("native_sparse_blocks", q, k, **given))
    lists = jax.jit(lambda q, k: ejkernel.lax.native_sparse_blocks(q, k, **given))(q, k)
    check(lists, q, k, size, cuts)
    if call.get("equal"):
        assert np.asarray(lists)[0, 899, 0].tolist() == [56, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "features, dtype", [(d, dtype) for d in (64, 128, 192, 256) for dtype in DTYPES if d <= 128 or dtype != "float32"]
)
def test_every_config(features, dtype):
    q, k = arrays(dtype, 1500, 32, 2, features)
    x = Operands(q, k, jnp.arange(8, dtype=jnp.int32)[None])
    candidates = configs.space("native_sparse_blocks", x, NativeSparseBlocksSpec(16), gpu_target())
    assert len(candidates) > 1
    for config in candidates:
        check(ejkernel.lax.native_sparse_blocks(q, k, block_counts=8, block_size=16, config=config), q, k, 16)


def test_wide_features_in_float32_are_left_to_xla():
    q, k = arrays("float32", 300, 8, 2, 192)
    given = dict(block_counts=5, block_size=16)
    assert "xla" in str(ejkernel.explain("native_sparse_blocks", q, k, **given))
    check(ejkernel.lax.native_sparse_blocks(q, k, **given), q, k, 16)


def test_equal_bits():
    q, k = arrays("bfloat16", 3000, 16, 2, 64)
    f = jax.jit(lambda q, k: ejkernel.lax.native_sparse_blocks(q, k, block_counts=8, block_size=16))
    first = f(q, k)
    for _ in range(3):
        np.testing.assert_array_equal(f(q, k), first)


def test_vmap_and_nan():
    """A batch of packed calls, and NaN in tokens of no sequence."""
    q, k = arrays("float32", 900, 8, 2, 64, b=3)
    cuts = np.asarray([[0, 300, 800], [100, 100, 900], [5, 6, 700]], np.int32)
    f = lambda q, k, cuts: ejkernel.lax.native_sparse_blocks(
        q[None], k[None], cu_seqlens=cuts, block_counts=6, block_size=16
    )[0]
    outside = np.stack([(np.arange(900) < c[0]) | (np.arange(900) >= c[-1]) for c in cuts])[:, :, None, None]
    poisoned = (jnp.where(outside, jnp.nan, x) for x in (q, k))
    lists = jax.jit(jax.vmap(f))(*poisoned, cuts)
    for b in range(3):
        check(lists[b : b + 1], q[b : b + 1], k[b : b + 1], 16, cuts[b])
