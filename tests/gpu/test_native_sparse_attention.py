"""native_sparse_attention in Triton on a GPU: forward, gradient and tangent against float64, and unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.kernels._xla.native_sparse_attention import reference
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16", "float32")


def call(s=200, t=260, h=32, g=2, d=64, e=64, n=3, size=64, cuts=None, dtype="bfloat16", scale=1.0, seed=0):
    """q, k and v, lists with repetitions and indices out of range, cu_seqlens, tangents and a cotangent."""
    rng = np.random.default_rng(seed)
    batch, t = (2, t) if cuts is None else (1, s)
    shapes = (batch, s, h, d), (batch, t, g, d), (batch, t, g, e)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    lists = jnp.asarray(rng.integers(-1, t // size + 2, (batch, s, g, n)), jnp.int32)
    cuts = None if cuts is None else jnp.asarray(cuts, jnp.int32)
    q, k, v = (normal(*shape) for shape in shapes)
    return (
        (q * jnp.asarray(scale, dtype), k, v),
        lists,
        cuts,
        [normal(*shape) for shape in shapes],
        normal(batch, s, h, e),
    )


def derived(f, x, tangents, do):
    """o, the gradients of q, k and v, and the tangent of o."""
    o, pull = jax.vjp(f, *x)
    return o, pull(do), jax.jvp(f, x, tangents)[1]


def check(size=64, config=None, forward="triton", **how):
    """The derivatives are Triton's, whatever the forward is in."""
    x, lists, cuts, tangents, do = call(size=size, **how)
    platform = "triton" if forward == "triton" else None
    spec = NativeSparseAttentionSpec(size, x[0].shape[-1] ** -0.5)
    packed = None if cuts is None else cuts[None]
    ours = lambda *x: ejkernel.lax.native_sparse_attention(
        *x, block_indices=lists, cu_seqlens=cuts, block_size=size, config=config, platform=platform
    )
    given = dict(q=x[0], k=x[1], v=x[2], block_indices=lists, block_size=size, platform=platform)
    assert f"{forward}/gpu with" in str(ejkernel.explain("native_sparse_attention", **given))
    found = jax.jit(partial(derived, ours))(x, tuple(tangents), do)
    formula = lambda lists, packed, *x: reference(*Operands(*x, lists, packed), spec=spec).o
    rounded = jax.jit(partial(derived, partial(formula, lists, packed)))(x, tuple(tangents), do)
    # In float64 it is compiled for the CPU, in a fraction of the GPU's compilation time.
    on_cpu = partial(jax.device_put, device=jax.devices("cpu")[0])
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: on_cpu(a).astype(jnp.float64), (x, tuple(tangents), do))
        exact = jax.jit(partial(derived, partial(formula, *on_cpu((lists, packed)))))(*wide)
    of_float32 = np.finfo(np.float32).eps * distance(do, np.zeros(do.shape))
    for name, a, b, c in zip(
        ("o", "dq", "dk", "dv", "do"), *map(jax.tree.leaves, (found, rounded, exact)), strict=True
    ):
        unit = max(distance(b, c), distance(c.astype(a.dtype), c)) or of_float32  # softmax of one key: no derivative
        error = distance(a, c)
        assert error <= (2 if name == "o" else 3) * unit, f"{name}: {error:.2e} where the formula has {unit:.2e}"


def distance(x, exact):
    x, exact = np.asarray(x).astype(np.float64), np.asarray(exact).astype(np.float64)
    return np.linalg.norm(x - exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", (1.0, 30.0, 1e-3), ids=("normal", "large logits", "uniform rows"))
def test_dtypes(dtype, scale):
    check(dtype=dtype, scale=scale)


@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (12, 4), (64, 4), (128, 1), (64, 1)])
@pytest.mark.parametrize("d, e", [(64, 64), (40, 24), (128, 128), (192, 128), (256, 256)])
def test_heads_and_features(h, g, d, e):
    check(h=h, g=g, d=d, e=e)


@pytest.mark.parametrize("size, n", [(16, 5), (32, 3), (40, 3), (128, 2), (200, 2), (8, 7), (64, 1)])
def test_blocks(size, n):
    check(size=size, n=n)


@pytest.mark.parametrize("s, t", [(1, 300), (300, 100), (257, 257), (64, 1)])
def test_lengths(s, t):
    check(s=s, t=t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(0, 300), (0, 64, 64, 100, 290), (3, 10, 200, 250)], ids=str)
def test_packed(cuts, dtype):
    check(s=300, cuts=cuts, dtype=dtype)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_every_config(dtype):
    x, lists, *_ = call(h=64, g=4, d=128, e=128, dtype=dtype)
    kernel = ejkernel.modules.NativeSparseAttention()
    given = dict(q=x[0], k=x[1], v=x[2], block_indices=lists)
    for config in kernel.config_space(ejkernel.ops.Invocation(kernel=kernel, args=(), kwargs=given)):
        check(h=64, g=4, d=128, e=128, dtype=dtype, config=config)


def test_a_block_of_many_queries():
    """More than one work item of the gradient of keys, and the same bits in a rerun."""
    check(s=2100, t=2100, h=16, g=1, n=4, size=32)
    x, lists, _, _, do = call(s=2100, t=2100, h=16, g=1, n=4, size=32)
    f = jax.jit(
        lambda *x: derived(partial(ejkernel.lax.native_sparse_attention, block_indices=lists, block_size=32), x, x, do)
    )
    first = f(*x)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, f(*x), first)


def test_invisible_keys_may_be_nan():
    (q, k, v), lists, cuts, tangents, do = call(s=300, cuts=(0, 90, 260), dtype="float32")
    poison = lambda a: a.at[:, 260:].set(jnp.nan)
    f = lambda *x: ejkernel.lax.native_sparse_attention(*x, block_indices=lists, cu_seqlens=cuts)
    run = jax.jit(lambda *x: derived(f, x, tuple(tangents), do))
    jax.tree.map(np.testing.assert_array_equal, run(poison(q), poison(k), poison(v)), run(q, k, v))


def test_all_branches():
    """They equal those of XLA, in bfloat16, with gradients."""
    (q, k, v), *_ = call(s=500, t=500, d=64)
    gates = jax.nn.sigmoid(jax.random.normal(jax.random.key(0), (3, *q.shape[:3])))
    lists = ejkernel.lax.native_sparse_blocks(q, k, block_counts=4, block_size=32)

    def loss(platform, *x):
        o = ejkernel.modules.native_sparse_attention(
            *x[:3], *x[3], block_indices=lists, block_size=32, sliding_window=64, platform=platform
        )
        return (o.astype(jnp.float32) ** 2).sum()

    found, wanted = (jax.jit(jax.grad(partial(loss, p), (0, 1, 2, 3)))(q, k, v, gates) for p in ("triton", "xla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)


def test_the_choice_is_that_of_the_cpu():
    """The same lists of scores in float32, except for blocks whose scores are equal up to rounding."""
    (q, k, _), *_ = call(s=500, t=500, dtype="float32")
    implementation = kernel_registry.find("native_sparse_blocks", "xla").implementation
    on_gpu = ejkernel.lax.native_sparse_blocks(q, k, block_counts=4, block_size=32)
    with jax.default_device(jax.devices("cpu")[0]):
        here = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k)]
        from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec

        ranks = jnp.arange(4, dtype=jnp.int32)[None]
        on_cpu = implementation(*here, ranks, None, spec=NativeSparseBlocksSpec(32, 64**-0.5)).block_indices
    assert (np.asarray(on_gpu) == np.asarray(on_cpu)).mean() > 0.999
