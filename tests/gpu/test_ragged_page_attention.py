"""The operations over pages and dense caches in Triton on a GPU, against their definitions in float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.paged import (
    PAGE,
    RAGGED_CONTEXTS,
    TOKENS,
    P,
    close,
    decode_defined,
    decode_step,
    ragged_defined,
    ragged_step,
)

import ejkernel
from ejkernel import lax
from ejkernel.kernels._triton import _launch

pytestmark = pytest.mark.gpu
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
OPTIONS = [
    {}, dict(window=9), dict(softcap=2.0), dict(num_splits=5, window=20), dict(softmax_scale=-0.3),
    dict(batch_invariant=True),
]  # fmt: skip


def check(x, **options):
    assert re.search("triton/gpu +takes this call", str(ejkernel.explain("ragged_page_attention", **x, **options)))
    run = partial(lax.ragged_page_attention, return_lse=True, config=dict(platform="triton"), **options)
    for a, b in zip(jax.jit(run)(**x), ragged_defined(x, **options), strict=True):
        close(a, b, TOLERANCE[x["q"].dtype.name])


def drafted(x, drafts):
    mask = np.random.default_rng(1).random((TOKENS, drafts)) < 0.5
    return x | dict(draft_mask=jnp.asarray(mask)) if drafts else x


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafts", (0, 12))
def test_options(dtype, options, drafts):
    check(drafted(ragged_step(dtype=dtype, pages=dtype), drafts), **options)


@pytest.mark.parametrize("d", (64, 72, 128, 192, 256))
@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (6, 2), (32, 2)])
@pytest.mark.parametrize("page", (8, 24, 64))
def test_heads_features_and_pages(h, g, d, page):
    contexts = np.asarray(RAGGED_CONTEXTS) * page // PAGE
    check(ragged_step(h, g, d, dtype="bfloat16", pages="bfloat16", contexts=contexts, page=page))


@pytest.mark.parametrize("pages", ("bfloat16", "float8_e4m3fn"))
@pytest.mark.parametrize("h, d", [(71, 64), (128, 128)])
@pytest.mark.parametrize("drafts", (0, 12))
@pytest.mark.parametrize("options", ({}, dict(window=9)), ids=str)
def test_many_heads_of_a_key(pages, h, d, drafts, options):
    check(drafted(ragged_step(h, 1, d, dtype="bfloat16", pages=pages), drafts), **options)


@pytest.mark.parametrize("pages", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", [None, (), (2,), (P, PAGE, 2)], ids=str)
def test_quantised_pages(pages, shape):
    x, rng = ragged_step(dtype="bfloat16", pages=pages), np.random.default_rng(2)
    if shape is not None:
        x |= {name: jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32) for name in ("k_scale", "v_scale")}
    check(x)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("h, g, d", [(6, 2, 64), (16, 1, 128), (4, 4, 72)])
@pytest.mark.parametrize("drafts", (0, 12))
def test_e4m3_that_the_kernel_converts(dtype, h, g, d, drafts, monkeypatch):
    """As on GPUs that do not."""
    monkeypatch.setattr(_launch, "dtype_of_cache", lambda dtype, target: np.dtype("uint8"))
    check(drafted(ragged_step(h, g, d, dtype=dtype, pages="float8_e4m3fn"), drafts))


def test_sinks():
    check(ragged_step() | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal((6, 3)), jnp.float32)))


@pytest.mark.parametrize("workers", (3, 128))
def test_plans(workers):
    x = ragged_step()
    plan = lax.page_plan(
        x["context_lens"], x["query_start_loc"], x["num_seqs"], page_size=PAGE, num_tokens=TOKENS, workers=workers,
        tokens_per_item=4,
    )  # fmt: skip
    check(x)
    found, wanted = (lax.ragged_page_attention(**x, plan=p, return_lse=True) for p in (plan, None))
    for a, b in zip(found, wanted, strict=True):
        close(a, b, 2e-6)
    x = decode_step()
    plan = lax.page_plan(x["context_lens"], page_size=8, workers=workers)
    for a, b in zip(lax.page_attention(**x, plan=plan, return_lse=True), decode_defined(x), strict=True):
        close(a, b, 2e-6)


@pytest.mark.parametrize("lengths", [(512, 1, 200, 64), (1, 1, 1, 1), (9, 1, 8, 700)], ids=str)
def test_chunks_of_prefills_beside_decodes(lengths):
    """Thousands of keys in pages of 64: several tiles of queries and of keys."""
    rng, contexts, page = np.random.default_rng(0), (3000, 1999, 812, 700), 64
    columns = -(-max(contexts) // page)
    x = dict(
        q=jnp.asarray(rng.standard_normal((sum(lengths), 8, 128)), jnp.bfloat16),
        kv_pages=jnp.asarray(rng.standard_normal((4 * columns, page, 4, 128)), jnp.bfloat16),
        context_lens=jnp.array(contexts),
        block_tables=jnp.asarray(rng.permutation(4 * columns).reshape(4, columns)),
        query_start_loc=jnp.asarray(np.cumsum([0, *lengths])),
        num_seqs=jnp.array([4]),
    )
    check(x)
    check(x, window=300)


def test_v3_writes_only_the_given_tokens():
    """The whole pool, byte for byte; and o equals that over the pool with the new keys and values."""
    x, rng = ragged_step(dtype="bfloat16", pages="bfloat16"), np.random.default_rng(3)
    x["block_tables"] = jnp.asarray(rng.permutation(30).reshape(6, 5))
    x["kv_pages"] = jnp.asarray(rng.standard_normal((32, PAGE, 4, 16)), jnp.bfloat16)
    new = {name: jnp.asarray(rng.standard_normal((TOKENS, 2, 16)), jnp.bfloat16) for name in ("k", "v")}
    tables = {n: a for n, a in x.items() if n not in ("q", "kv_pages")}
    run = lambda platform: jax.jit(
        lambda pages: lax.ragged_page_attention_v3(
            x["q"], **new, kv_pages=pages, **tables, config=dict(platform=platform)
        ),
        donate_argnums=0,
    )(x["kv_pages"] + 0)
    (o, pages), (_, wanted) = run("triton"), run("xla")
    np.testing.assert_array_equal(pages.view(jnp.uint16), wanted.view(jnp.uint16))
    close(o, ragged_defined(x | dict(kv_pages=wanted))[0], TOLERANCE["bfloat16"])


@pytest.mark.parametrize("options", [{}, dict(window=9), dict(num_splits=3), dict(softcap=2.0)], ids=str)
def test_a_dense_cache(options):
    """It equals page_attention whose pages follow one another, from some key on."""
    x = decode_step(dtype="bfloat16", pages="bfloat16")
    n = len(x["block_tables"])
    k, v = (x[name][x["block_tables"]].reshape(n, -1, *x[name].shape[2:]) for name in ("k_pages", "v_pages"))
    start = jnp.zeros(n, jnp.int32)
    found = lax.ragged_decode_attention(x["q"], k, v, start, x["context_lens"], return_lse=True, **options)
    for a, b in zip(found, decode_defined(x, **options), strict=True):
        close(a, b, TOLERANCE["bfloat16"])
    assert "triton/gpu with" in str(ejkernel.explain("ragged_decode_attention", x["q"], k, v, start, x["context_lens"]))
    at = lambda start: lax.ragged_decode_attention(x["q"], k, v, start, x["context_lens"], config=dict(platform="xla"))
    start = x["context_lens"] // 2
    close(lax.ragged_decode_attention(x["q"], k, v, start, x["context_lens"]), at(start), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("queries, keys", [(1, 3000), (4, 700), (3, 2)])
@pytest.mark.parametrize(
    "options", [dict(causal=True), {}, dict(causal=True, window=100, softcap=5.0), dict(batch_invariant=True)], ids=str
)
@pytest.mark.parametrize("h, g, d, e", [(8, 2, 128, 128), (6, 6, 72, 64), (16, 1, 256, 256)])
def test_flash_attention_of_few_queries(queries, keys, options, h, g, d, e):
    check_few_queries(queries, keys, h, g, d, e, options)


@pytest.mark.parametrize("h, d", [(71, 64), (128, 128)])
@pytest.mark.parametrize("options", [dict(causal=True), {}, dict(window=(100, None), softcap=5.0)], ids=str)
def test_flash_attention_of_one_query_with_many_heads(h, d, options):
    check_few_queries(1, 3000, h, 1, d, d, options)


def check_few_queries(queries, keys, h, g, d, e, options):
    """The same kernels, against the formula in XLA."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((3, queries, h, d), (3, keys, g, d), (3, keys, g, e))
    )
    explained = str(ejkernel.explain("flash_attention", q, k, v, **options))
    assert "300  triton/gpu    takes this call" in explained
    found, wanted = (
        lax.flash_attention(q, k, v, **options, return_lse=True, config=config)
        for config in (None, dict(platform="xla"))
    )
    for a, b in zip(found, wanted, strict=True):
        close(a, b, TOLERANCE["bfloat16"])
