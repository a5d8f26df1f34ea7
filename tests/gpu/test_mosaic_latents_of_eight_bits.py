"""Latents in pages of eight bits, which Mosaic GPU converts, against their definition in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.latent_pages import defined, lists, poisoned, step, unnamed
from kernels.paged import close, in_pages

import ejkernel

from .test_mosaic_multi_latent_page_attention import of_lengths

pytestmark = pytest.mark.gpu
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}
PAGES = ("float8_e4m3fn", "int8")
DEEPSEEK = dict(latent=512, rope=64)
# Softmax scales with which the weights are of many sizes.
SCALE = {"float8_e4m3fn": 576**-0.5, "int8": 576**-0.5 / 4}
run = partial(ejkernel.lax.multi_latent_page_attention, return_lse=True, platform="pallas")


def check(x, **options):
    wanted = defined(x, **options)
    for a, b in zip(jax.jit(partial(run, **options))(**x), wanted, strict=True):
        close(a, b, TOLERANCE[x["q_latent"].dtype.name])


def scaled(x, scales):
    """The arguments with a scale for all slots, or for each."""
    of_slots = jnp.asarray(np.random.default_rng(1).uniform(0.1, 0.5, (*x["pages"].shape[:2], 1)), jnp.float32)
    return x | {"none": {}, "one": dict(k_scale=jnp.float32(0.3)), "slots": dict(k_scale=of_slots)}[scales]


@pytest.mark.parametrize("h", (1, 16, 20, 128))
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(
    "dtype, scales", [("bfloat16", "none"), ("bfloat16", "one"), ("bfloat16", "slots"), ("float16", "none")]
)
@pytest.mark.parametrize("page", (16, 32, 64, 128))
def test_steps(h, pages, dtype, scales, page):
    x = scaled(step(h, dtype=dtype, pages=pages, page=page, **DEEPSEEK), scales)
    check(x, softmax_scale=SCALE[pages])


@pytest.mark.parametrize("h", (8, 16, 20, 32, 64, 128))
@pytest.mark.parametrize("tokens", (1, 2, 64))
@pytest.mark.parametrize("options", [{}, dict(num_splits=3), dict(window=70, num_splits=3), dict(softcap=2.0)], ids=str)
def test_lengths(h, tokens, options):
    x = of_lengths((0, 1, 63, 64, 65, 128, 129, 1000), tokens, h)
    options["softmax_scale"] = x.pop("softmax_scale")
    check(scaled(x | dict(pages=in_pages(x["pages"], "float8_e4m3fn")), "slots"), **options)


@pytest.mark.parametrize("h", (2, 16, 20, 128))
@pytest.mark.parametrize("scales", ("none", "one", "slots"))
@pytest.mark.parametrize("num_splits", (1, 3))
def test_keys_after_the_context_are_invisible(h, scales, num_splits):
    """NaN in slots after each context, and in their scales."""
    x, with_nan = poisoned(step(h, "bfloat16", "float8_e4m3fn", page=64, **DEEPSEEK))
    hides = jnp.isnan(with_nan["pages"].astype(jnp.float32))[..., 0]
    x, with_nan = scaled(x, scales), scaled(with_nan, scales)
    if scales == "slots":
        with_nan["k_scale"] = jnp.where(hides[..., None], jnp.nan, with_nan["k_scale"])
    call = jax.jit(partial(run, num_splits=num_splits))
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("h", (5, 16, 32, 128))
def test_reruns_give_the_same_bits(h):
    x = of_lengths((700, 1000, 4096), 3, h)
    x |= dict(pages=in_pages(x["pages"], "int8"), softmax_scale=SCALE["int8"] / 4)
    call = jax.jit(partial(run, softmax_scale=x.pop("softmax_scale")))
    first = call(**scaled(x, "slots"))
    for _ in range(20):
        jax.tree.map(np.testing.assert_array_equal, call(**scaled(x, "slots")), first)


@pytest.mark.parametrize("h", (1, 16, 20, 128))
@pytest.mark.parametrize("scales", ("none", "one", "slots"))
@pytest.mark.parametrize("pages, keys, page", [("float8_e4m3fn", 70, 64), ("int8", 300, 8)])
def test_lists(h, scales, pages, keys, page):
    x = scaled(step(h, "bfloat16", pages, page=page, **DEEPSEEK), scales)
    check(x | dict(indices=lists(keys, x)), softmax_scale=SCALE[pages])


@pytest.mark.parametrize("h", (16, 20, 128))
@pytest.mark.parametrize("scales", ("one", "slots"))
def test_unlisted_keys_may_be_nan(h, scales):
    x = step(h, "bfloat16", "float8_e4m3fn", page=64, **DEEPSEEK)
    x, with_nan = unnamed(x, lists(150, x))
    hides = jnp.isnan(with_nan["pages"].astype(jnp.float32))[..., :1]
    x, with_nan = scaled(x, scales), scaled(with_nan, scales)
    if scales == "slots":
        with_nan["k_scale"] = jnp.where(hides, jnp.nan, with_nan["k_scale"])
    call = jax.jit(run)
    jax.tree.map(np.testing.assert_array_equal, call(**with_nan), call(**x))


@pytest.mark.parametrize("h", (5, 128))
def test_queries_of_any_size(h):
    """Rows of 1e30 and 1e-30 in one tile, whose logits are brought to one size by scales of the softmax."""
    x = step(h, "bfloat16", "float8_e4m3fn", page=64, **DEEPSEEK)
    for size in (1e30, 1e-30):
        many = {name: x[name] * jnp.asarray(size, "bfloat16") for name in ("q_latent", "q_rope")}
        check(x | many, softmax_scale=576**-0.5 / size)
    mixed = jnp.where(jnp.arange(h)[:, None] % 2, 1e4, 1e-4).astype("bfloat16")
    check(x | {name: x[name] * mixed for name in ("q_latent", "q_rope")}, softmax_scale=576**-0.5)
