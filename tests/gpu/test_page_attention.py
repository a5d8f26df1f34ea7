"""page_attention in Triton on a GPU against its definition in float64: options, kinds of pages, unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.paged import CONTEXTS, MOVING, J, N, P, close, decode_defined, decode_step

import ejkernel

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
run = partial(ejkernel.lax.page_attention, return_lse=True)


def check(x, **options):
    plain = {name: option for name, option in options.items() if name != "config"}
    assert "triton/gpu with" in str(ejkernel.explain("page_attention", **x, **plain))
    wanted = decode_defined(x, **plain)
    for a, b in zip(jax.jit(partial(run, **options))(**x), wanted, strict=True):
        close(a, b, TOLERANCE[x["q"].dtype.name])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options", [{}, dict(window=9), dict(softcap=2.0), dict(num_splits=3, window=20), dict(softmax_scale=-0.3)], ids=str
)
def test_options(dtype, options):
    check(decode_step(dtype=dtype, pages=dtype), **options)


@pytest.mark.parametrize("d, e", [(64, 64), (72, 40), (80, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (3, 1), (32, 2)])
@pytest.mark.parametrize("page", (8, 24, 64))
def test_heads_features_and_pages(h, g, d, e, page):
    check(decode_step(h, g, d, e, page, dtype="bfloat16", pages="bfloat16"))


@pytest.mark.parametrize("pages", ("bfloat16", "int8"))
@pytest.mark.parametrize("h, d", [(71, 64), (128, 128)])
@pytest.mark.parametrize("num_splits", (None, 1, 3))
def test_many_heads_of_a_key(h, d, pages, num_splits):
    check(decode_step(h, 1, d, d, dtype="bfloat16", pages=pages), num_splits=num_splits)


@pytest.mark.parametrize(
    "config", [dict(keys_per_block=16), dict(keys_per_block=128, num_warps=8, num_stages=2)], ids=str
)
def test_configs(config):
    check(decode_step(page=64), config=dict(config, platform="triton", num_splits=2))


@pytest.mark.parametrize("sinks", [(6,), (6, 3)], ids=str)
def test_sinks(sinks):
    check(decode_step() | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", [None, (), (2,), (P, 8, 2)], ids=str)
def test_quantised_pages(dtype, pages, shape):
    x, rng = decode_step(dtype=dtype, pages=pages), np.random.default_rng(2)
    if shape is not None:
        x |= {name: jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32) for name in ("k_scale", "v_scale")}
    check(x)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", [None, (2,), (P, 64, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(softcap=2.0, window=99), dict(num_splits=3)], ids=str)
def test_pairs_of_eight_bits(dtype, pages, shape, options):
    """Features that are a power of two, in pages of 64, with factors of very different magnitudes."""
    x, rng = decode_step(16, 2, 128, 64, 64, dtype=dtype, pages=pages), np.random.default_rng(2)
    if shape is not None:
        x |= {name: jnp.asarray(10 ** rng.uniform(-3, 0, shape), jnp.float32) for name in ("k_scale", "v_scale")}
    check(x, **options)


def test_keys_after_the_context_are_invisible():
    """NaN in the slots and scales after each context, and any numbers in tables after it."""
    x, page = decode_step(), 8
    x["block_tables"] = jnp.arange(N * J, dtype=jnp.int32).reshape(N, J)
    pool = np.random.default_rng(0).standard_normal((N * J, page, 2, 16))
    x |= dict(k_pages=jnp.asarray(pool, jnp.float32), v_pages=jnp.asarray(2 * pool, jnp.float32))
    x |= {name: jnp.asarray(1 + np.abs(pool[..., 0]), jnp.float32) for name in ("k_scale", "v_scale")}
    used = (np.arange(J * page) < np.asarray(CONTEXTS)[:, None]).reshape(N * J, page)
    poison = lambda a: jnp.where(used.reshape(*used.shape, *(1,) * (a.ndim - 2)), a, jnp.nan)
    poisoned = {n: poison(a) if n.endswith(("pages", "scale")) else a for n, a in x.items()}
    held = np.arange(J) < -(-np.asarray(CONTEXTS) // page)[:, None]
    poisoned["block_tables"] = jnp.where(held, x["block_tables"], jnp.array([-1, 2**31 - 1, -(2**31), 7, N * J]))
    jax.tree.map(np.testing.assert_array_equal, run(**poisoned), run(**x))


def test_batch_invariant():
    """A sequence has the same bits alone and in a step of forty, at any place."""
    rng, x = np.random.default_rng(3), decode_step(page=64, dtype="bfloat16", pages="bfloat16")
    x["block_tables"] = jnp.tile(x["block_tables"], (1, 10))  # several parts
    x["context_lens"] = 9 * x["context_lens"]
    order = rng.integers(0, N, 40)
    call = jax.jit(partial(run, batch_invariant=True))
    found = call(**{n: a[order] if n in MOVING else a for n, a in x.items()})
    for n in range(N):
        alone = call(**{name: a[n : n + 1] if name in MOVING else a for name, a in x.items()})
        for one, all_of in zip(alone, found, strict=True):
            for place in np.flatnonzero(order == n):
                np.testing.assert_array_equal(one[0], all_of[place])


@pytest.mark.parametrize("num_splits", (2, 7, 16, 40))
def test_splits_are_merged_in_one_order(num_splits):
    """Whichever program is the last: a hundred runs have the same bits."""
    x = decode_step(8, 2, 128, 128, 64, dtype="bfloat16", pages="bfloat16")
    x |= dict(block_tables=jnp.tile(x["block_tables"], (1, 10)), context_lens=9 * x["context_lens"])
    call = jax.jit(partial(run, num_splits=num_splits))
    first, wanted = call(**x), decode_defined(x)
    for a, b in zip(first, wanted, strict=True):
        close(a, b, TOLERANCE["bfloat16"])
    for found in [call(**x) for _ in range(100)]:
        jax.tree.map(np.testing.assert_array_equal, found, first)


def test_under_vmap():
    """Steps over one pool: the pool is not repeated."""
    x = decode_step(dtype="bfloat16", pages="bfloat16")
    both = {n: jnp.stack([x[n], x[n][::-1]]) for n in MOVING}
    found = jax.vmap(lambda moving: run(**x | moving))(both)
    for a, b, c in zip(found, run(**x), run(**x | {n: x[n][::-1] for n in MOVING}), strict=True):
        np.testing.assert_array_equal(a, jnp.stack([b, c]))
