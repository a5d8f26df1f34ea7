"""multi_latent_page_attention in Mosaic GPU against its definition in float64: heads, lengths, splits, hidden slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.latent_pages import defined, lists, poisoned, step, tree, unnamed
from kernels.paged import close

import ejkernel

pytestmark = pytest.mark.gpu
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}
DEEPSEEK = dict(latent=512, rope=64)
run = partial(ejkernel.lax.multi_latent_page_attention, return_lse=True, platform="pallas")


def check(x, **options):
    wanted = defined(x, **options)
    for a, b in zip(jax.jit(partial(run, **options))(**x), wanted, strict=True):
        close(a, b, TOLERANCE[x["q_latent"].dtype.name])


def of_lengths(contexts, tokens, h, page=64, dtype="bfloat16", seed=0):
    """A step of sequences with these contexts, each with up to so many tokens."""
    rng, counts = np.random.default_rng(seed), [min(tokens, context) for context in contexts]
    columns = max(1, -(-max(contexts) // page))
    pages = columns * len(contexts)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    integers = lambda numbers: jnp.asarray(numbers, jnp.int32)
    return dict(
        q_latent=normal(sum(counts), h, 512),
        q_rope=normal(sum(counts), h, 64),
        pages=normal(pages, page, 576),
        context_lens=integers(contexts),
        block_tables=integers(rng.permutation(pages).reshape(len(contexts), columns)),
        query_start_loc=integers(np.cumsum([0, *counts])),
        num_seqs=jnp.array([len(contexts)]),
        softmax_scale=576**-0.5,
    )


@pytest.mark.parametrize("h", (1, 3, 5, 16, 64, 80, 128))
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page", (16, 32, 64, 128))
def test_steps(h, dtype, page):
    check(step(h, dtype=dtype, pages=dtype, page=page, **DEEPSEEK))


@pytest.mark.parametrize("h", (8, 16, 20, 32, 64, 128))
@pytest.mark.parametrize("tokens", (1, 2, 64))
@pytest.mark.parametrize("num_splits", (1, 3))
def test_lengths(h, tokens, num_splits):
    x = of_lengths((0, 1, 63, 64, 65, 128, 129, 1000), tokens, h)
    options = dict(softmax_scale=x.pop("softmax_scale"), num_splits=num_splits)
    check(x, **options)


@pytest.mark.parametrize("h, tokens", [(16, 1), (7, 2), (16, 2), (16, 70), (128, 70)])
@pytest.mark.parametrize("options", [dict(window=9), dict(softcap=2.0), dict(window=70, num_splits=3)], ids=str)
@pytest.mark.parametrize("drafts", (0, 5, 70, 140))
def test_options(h, tokens, options, drafts):
    x = of_lengths((1, 65, 1000), tokens, h)
    scale = x.pop("softmax_scale")
    if drafts:
        mask = np.random.default_rng(1).random((len(x["q_latent"]), drafts)) < 0.5
        x["draft_mask"] = jnp.asarray(mask)
    check(x, **options, softmax_scale=scale)


@pytest.mark.parametrize("h", (5, 16, 128))
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sinks", (None, 1, 3))
def test_drafts(h, dtype, sinks):
    """Also of a sequence with more tokens than keys, and NaN in slots after each context."""
    x = step(h, dtype=dtype, pages=dtype, page=64, **DEEPSEEK) | dict(draft_mask=tree(4))
    if sinks:
        x["sinks"] = jnp.asarray(np.random.default_rng(1).standard_normal((h, sinks)), jnp.float32)
    check(x)
    x, with_nan = poisoned(x)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(**with_nan), jax.jit(run)(**x))


@pytest.mark.parametrize("sinks", [(16,), (16, 3)], ids=str)
@pytest.mark.parametrize("num_splits", (1, 3))
def test_sinks(sinks, num_splits):
    given = jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32)
    check(step(16, "bfloat16", "bfloat16", page=64, **DEEPSEEK) | dict(sinks=given), num_splits=num_splits)


@pytest.mark.parametrize("h", (2, 5, 16, 128))
@pytest.mark.parametrize("num_splits", (1, 3))
def test_keys_after_the_context_are_invisible(h, num_splits):
    """NaN in slots after each context and in tokens of no sequence, and any numbers in tables after them."""
    x, with_nan = poisoned(step(h, "bfloat16", "bfloat16", page=64, **DEEPSEEK))
    call = jax.jit(partial(run, num_splits=num_splits))
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("h", (16, 32, 64))
@pytest.mark.parametrize("family", ("large", "peaks", "uniform"))
def test_families_of_inputs(h, family):
    """Large logits; one key that has all the weight, in a tile of either warpgroup; rows of equal weights."""
    x = of_lengths((700, 1000, 4096), 1, h)
    if family == "large":
        x |= dict(q_latent=x["q_latent"] * 30)
    elif family == "uniform":
        x |= dict(q_latent=x["q_latent"] * 0, q_rope=x["q_rope"] * 0)
    else:
        for sequence, key in enumerate((3, 900, 4000 - 64)):
            at = x["block_tables"][sequence, key // 64], key % 64
            x["pages"] = x["pages"].at[at].set(jnp.concatenate([x["q_latent"], x["q_rope"]], -1)[sequence, 0] * 10)
    scale = x.pop("softmax_scale")
    check(x, softmax_scale=scale)


@pytest.mark.parametrize("h", (2, 5, 128))
def test_reruns_give_the_same_bits(h):
    x, call = step(h, "bfloat16", "bfloat16", page=64, scale=4, **DEEPSEEK), jax.jit(run)
    jax.tree.map(np.testing.assert_array_equal, call(**x), call(**x))


# --- Lists of keys


@pytest.mark.parametrize("h", (1, 3, 16, 17, 32, 64, 80, 128))
@pytest.mark.parametrize("keys", (1, 64, 70, 128, 1000))
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lists(h, keys, dtype):
    x = step(h, dtype, dtype, page=64, scale=8, **DEEPSEEK)
    check(x | dict(indices=lists(keys, x)))


@pytest.mark.parametrize("h, page", [(16, 8), (20, 1), (64, 24), (64, 128)])
@pytest.mark.parametrize("options", [{}, dict(window=9), dict(softcap=2.0), dict(num_splits=3)], ids=str)
@pytest.mark.parametrize("drafts", (0, 3))
def test_options_of_lists(h, page, options, drafts):
    x = step(h, "bfloat16", "bfloat16", page=page, scale=8, **DEEPSEEK)
    check(x | dict(indices=lists(300, x)) | (dict(draft_mask=tree(drafts)) if drafts else {}), **options)


@pytest.mark.parametrize("sinks", [(64,), (64, 3)], ids=str)
@pytest.mark.parametrize("num_splits", (1, 2))
def test_sinks_of_lists(sinks, num_splits):
    x = step(64, "bfloat16", "bfloat16", page=64, **DEEPSEEK)
    given = jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32)
    check(x | dict(indices=lists(300, x), sinks=given), num_splits=num_splits)


@pytest.mark.parametrize("h", (16, 64))
@pytest.mark.parametrize("num_splits", (1, 2))
def test_unlisted_keys_may_be_nan(h, num_splits):
    x = step(h, "bfloat16", "bfloat16", page=8, **DEEPSEEK)
    x, with_nan = unnamed(x, lists(140, x))
    call = jax.jit(partial(run, num_splits=num_splits))
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("pools", (1, 2))
def test_batches_of_lists(pools):
    """Under vmap, with a pool for each step of the batch and with one for all."""
    x = step(64, "bfloat16", "bfloat16", page=64, **DEEPSEEK)
    both = [x | dict(indices=lists(200, x, seed)) | (dict(pages=x["pages"] * (1 + seed)) if pools > 1 else {})
            for seed in range(2)]  # fmt: skip
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *both)
    axes = {name: 0 for name in x | dict(indices=0)} | (dict(pages=None) if pools == 1 else {})
    stacked |= dict(pages=x["pages"]) if pools == 1 else {}
    found = jax.jit(jax.vmap(lambda x: run(**x), in_axes=(axes,)))(stacked)
    for n, one in enumerate(both):
        for a, b in zip(found, defined(one), strict=True):
            close(a[n], b, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("h", (16, 32, 128))
def test_lists_of_many_tokens_in_every_order(h):
    """2048 keys in random order, other ones for each of the tokens of two sequences, whose contexts differ."""
    x, rng = of_lengths((2500, 4096), 40, h), np.random.default_rng(3)
    scale, tokens = x.pop("softmax_scale"), x["q_latent"].shape[0]
    indices = np.stack([rng.permutation(4096)[:2048] for _ in range(tokens)])
    check(x | dict(indices=jnp.asarray(indices, jnp.int32)), softmax_scale=scale)
