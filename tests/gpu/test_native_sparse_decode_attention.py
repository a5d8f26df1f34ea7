"""native_sparse_decode_attention in Triton on a GPU, beside the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton.native_sparse_decode_attention import configs
from ejkernel.primitives.native_sparse_decode_attention import Operands
from tests.kernels import sparse_decoding

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
CALLS = sparse_decoding.CALLS | {
    "the shape of its paper": dict(t=8192, h=64, g=4, d=128, e=128, n=16, size=64, window=512),
    "one group of 64, of 192 and 128 features": dict(t=4096, h=64, g=1, d=192, e=128, n=9, size=32, window=100),
    "groups of 5 heads, of 80 features": dict(t=3000, h=40, g=8, d=80, e=80, n=8, size=32, window=77),
    "16,384 blocks": dict(b=4, t=2**18, h=16, g=1, d=64, e=64, n=16, size=16, window=40),
    "means in float32": dict(t=1000, of_means="float32", window=12),
    "more blocks than the kernel of their choice takes": dict(n=1025),
}


def step(x: Operands, spec, **options):
    given = {name: a for name, a in x._asdict().items() if a is not None and name != "ranks"}
    if x.block_indices is not None and x.g_cmp is None:
        given.pop("k_cmp")
    counts = {} if x.ranks is None else dict(block_counts=x.ranks.shape[1])
    return ejkernel.lax.native_sparse_decode_attention(
        **given, **counts, block_size=spec.block_size, window=spec.window, return_block_indices=True, **options
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results(call, dtype):
    x, spec = sparse_decoding.operands(dtype, **call)
    o, blocks = jax.jit(lambda x: step(x, spec))(x)
    if call.get("g", 2) > 1 or dtype != "float32":
        assert "triton_kernel_call" in jax.jit(lambda x: step(x, spec)).lower(x).as_text()
    sparse_decoding.check(o, blocks, x, spec, TOLERANCE[dtype])


@pytest.mark.parametrize("features", (64, 256))
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", (1, 16, 64))
def test_every_config(group, dtype, features):
    shape = dict(t=2000, h=2 * group, d=features, e=features, n=8, size=16, window=300)
    x, spec = sparse_decoding.operands(dtype, **shape)
    if group == 64 and dtype == "float32":
        assert "up to 32 in float32" in str(ejkernel.explain("native_sparse_decode_attention", **arguments(x)))
        return
    candidates = configs.space("native_sparse_decode_attention", x, spec, gpu_target())
    assert len(candidates) > 1
    for config in candidates:
        sparse_decoding.check(*step(x, spec, config=config), x, spec, TOLERANCE[dtype])


def arguments(x: Operands):
    return dict(q=x.q, k=x.k, v=x.v, sequence_end=x.sequence_end, k_cmp=x.k_cmp, block_counts=8, block_size=16)


def test_vmap_and_equal_bits():
    calls = [sparse_decoding.operands("bfloat16", t=900, window=40, seed=seed) for seed in range(3)]
    spec, xs = calls[0][1], [x for x, _ in calls]
    together = jax.tree.map(lambda *a: jnp.stack(a), *(x._replace(ranks=None) for x in xs))
    ranked = lambda x: x._replace(ranks=xs[0].ranks)
    f = jax.jit(jax.vmap(lambda x: step(ranked(x), spec)))
    o, blocks = f(together)
    for n, x in enumerate(xs):
        sparse_decoding.check(o[n], blocks[n], x, spec, TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(f(together)[0], o)


def test_lengths_are_traced():
    """One program for all lengths."""
    x, spec = sparse_decoding.operands("bfloat16", t=900, window=40, gates=("g_slc", "g_swa"))
    finite = x._replace(k=jnp.nan_to_num(x.k), v=jnp.nan_to_num(x.v), k_cmp=jnp.nan_to_num(x.k_cmp))
    f = jax.jit(lambda x: step(x, spec))
    for ends in ([0, 5, 100, 900], [0, 900, 899, 897], [0, 2**30, 1, 2]):
        now = finite._replace(sequence_end=jnp.asarray(ends, jnp.int32))
        o, blocks = f(now)
        capped = now._replace(sequence_end=jnp.minimum(now.sequence_end, 900))
        sparse_decoding.check(o, blocks, capped, spec, TOLERANCE["bfloat16"])
    assert f._cache_size() == 1
