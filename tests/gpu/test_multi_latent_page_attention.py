"""multi_latent_page_attention in Triton on a GPU against its definition in float64: options, pages, hidden slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.latent_pages import COUNT, LENGTHS, PAGE, P, defined, lists, poisoned, step, tree, unnamed
from kernels.paged import close

import ejkernel

pytestmark = pytest.mark.gpu
NAME = "multi_latent_page_attention"
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
DEEPSEEK = dict(latent=512, rope=64, page=64)
run = partial(ejkernel.lax.multi_latent_page_attention, return_lse=True)


def check(x, **options):
    plain = {name: option for name, option in options.items() if name != "config"}
    options = options if options.get("config") else plain | dict(platform="triton")
    assert "triton/gpu with" in str(ejkernel.explain(NAME, **x, **plain, platform="triton"))
    wanted = defined(x, **plain)
    for a, b in zip(jax.jit(partial(run, **options))(**x), wanted, strict=True):
        close(a, b, TOLERANCE[x["q_latent"].dtype.name])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("drafts", (0, 3, 40, 140))
@pytest.mark.parametrize(
    "options", [{}, dict(window=9), dict(softcap=2.0), dict(num_splits=3, window=20), dict(softmax_scale=-0.3)], ids=str
)
def test_options(dtype, drafts, options):
    check(step(dtype=dtype, pages=dtype) | (dict(draft_mask=tree(drafts)) if drafts else {}), **options)


@pytest.mark.parametrize("h", (1, 3, 16, 32, 64, 80, 128))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("scale", (1, 8))
def test_deepseek(h, dtype, scale):
    """Latents of 512 and rotary parts of 64; the longest context is 320 or 2560."""
    check(step(h, dtype=dtype, pages=dtype, scale=scale, **DEEPSEEK))


@pytest.mark.parametrize("h", (1, 16, 128))
def test_deepseek_in_float32(h):
    check(step(h, scale=2, **DEEPSEEK))


@pytest.mark.parametrize("latent, rope", ((16, 16), (40, 24), (96, 32), (256, 64), (384, 48), (512, 128)))
@pytest.mark.parametrize("page", (8, 24, 64))
def test_features_and_pages(latent, rope, page):
    check(step(16, "bfloat16", "bfloat16", latent=latent, rope=rope, page=page))


CONFIGS = (
    dict(queries_per_block=1, keys_per_block=16, num_warps=4),
    dict(queries_per_block=4, heads_per_block=16, num_splits=3),
    dict(queries_per_block=2, heads_per_block=8, keys_per_block=32, num_splits=2),
    dict(heads_per_block=64, keys_per_block=32, num_stages=3),
    dict(queries_per_block=1, heads_per_block=16, num_warps=4, num_splits=2, algorithm="transposed"),
    dict(queries_per_block=2, heads_per_block=16, num_warps=8, algorithm="transposed"),
)


@pytest.mark.parametrize("h", (16, 128))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs(config, h):
    check(step(h, "bfloat16", "bfloat16", **DEEPSEEK), config=dict(config, platform="triton"))


@pytest.mark.parametrize("sinks", [(16,), (16, 3)], ids=str)
@pytest.mark.parametrize("num_splits", (1, 3))
def test_sinks(sinks, num_splits):
    given = jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32)
    check(step(16, "bfloat16", "bfloat16", **DEEPSEEK) | dict(sinks=given), num_splits=num_splits)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", [None, (), (P, PAGE, 1)], ids=str)
def test_quantised_pages(dtype, pages, shape):
    x, rng = step(dtype=dtype, pages=pages), np.random.default_rng(2)
    check(x if shape is None else x | dict(k_scale=jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32)))


@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("h", (16, 128))
def test_quantised_pages_of_deepseek(pages, h):
    x = step(h, "bfloat16", pages, **DEEPSEEK)
    scale = np.random.default_rng(2).uniform(0.05, 0.2, (P, 64, 1))
    check(x | dict(k_scale=jnp.asarray(scale, jnp.float32), draft_mask=tree(8)), softcap=20.0)


@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("h", (16, 128))
def test_keys_after_the_context_are_invisible(h, drafts):
    """NaN in slots after each context and in tokens of no sequence, and any numbers in tables after them."""
    x = step(h, "bfloat16", "bfloat16", **DEEPSEEK) | (dict(draft_mask=tree(drafts)) if drafts else {})
    x, with_nan = poisoned(x)
    call = jax.jit(run)
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize(
    "options", [{}, dict(window=9), dict(softcap=2.0), dict(num_splits=3, window=20), dict(softmax_scale=-0.3)], ids=str
)
def test_lists_of_keys(dtype, drafts, options):
    x = step(dtype=dtype, pages=dtype)
    check(x | dict(indices=lists(37, x)) | (dict(draft_mask=tree(drafts)) if drafts else {}), **options)


@pytest.mark.parametrize("h", (1, 3, 16, 64, 128))
@pytest.mark.parametrize("keys", (1, 70, 1000))
def test_lists_of_deepseek(h, keys):
    x = step(h, dtype="bfloat16", pages="bfloat16", scale=8, **DEEPSEEK)
    check(x | dict(indices=lists(keys, x)))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs_of_lists(config):
    x = step(16, "bfloat16", "bfloat16", **DEEPSEEK)
    check(x | dict(indices=lists(70, x)), config=dict(config, platform="triton"))


@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", [(), (P, 64, 1)], ids=str)
def test_lists_of_quantised_keys_with_sinks(pages, shape):
    x, rng = step(16, "bfloat16", pages, **DEEPSEEK), np.random.default_rng(2)
    x |= dict(k_scale=jnp.asarray(rng.uniform(0.05, 0.2, shape), jnp.float32), indices=lists(70, x))
    check(x | dict(sinks=jnp.asarray(rng.standard_normal((16, 3)), jnp.float32)))


def test_unlisted_keys_may_be_nan():
    x, with_nan = unnamed(step(), lists(5, step()))
    call = jax.jit(run)
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("h", (16, 128))
def test_batch_invariant(h):
    """A token has the same bits alone, with all of its sequence, and with all others."""
    x, starts = step(h, "bfloat16", "bfloat16", scale=4, **DEEPSEEK), np.cumsum([0, *LENGTHS])
    call = jax.jit(partial(run, batch_invariant=True))
    found = call(**x)
    for n in range(COUNT):
        for begin in {starts[n], max(starts[n], starts[n + 1] - 1)} - {starts[n + 1]}:
            own, length = slice(begin, starts[n + 1]), starts[n + 1] - begin
            alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
            alone |= {name: x[name][own] for name in ("q_latent", "q_rope")}
            alone |= dict(query_start_loc=jnp.array([0, length]), num_seqs=jnp.int32(1))
            for one, of_all in zip(call(**x | alone), found, strict=True):
                np.testing.assert_array_equal(one, of_all[own])


def test_under_vmap():
    """Steps over one pool: the pool is not repeated."""
    x, other = (step(16, "bfloat16", "bfloat16", seed=seed, **DEEPSEEK) for seed in (0, 1))
    both = {name: jnp.stack([x[name], other[name]]) for name in x if name != "pages"}
    found = jax.vmap(lambda moving: run(**x | moving, config=dict(platform="triton", heads_per_block=16)))(both)
    for n, step_of in enumerate((x, other)):
        wanted = run(**step_of | dict(pages=x["pages"]), config=dict(platform="triton", heads_per_block=16))
        jax.tree.map(lambda a, b, n=n: np.testing.assert_array_equal(a[n], b), found, wanted)


def test_reruns_give_the_same_bits():
    x, call = step(128, "bfloat16", "bfloat16", scale=4, **DEEPSEEK), jax.jit(run)
    jax.tree.map(np.testing.assert_array_equal, call(**x), call(**x))
