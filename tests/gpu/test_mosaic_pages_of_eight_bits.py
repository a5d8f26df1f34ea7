"""ragged_page_attention over pages of eight bits on Hopper: a warpgroup converts them for the products of others."""

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.kernels._pallas.gpu.ragged_page_attention import BLOCKS
from ejkernel.kernels._registry import kernel_registry

from .device import ON_HOPPER
from .test_mosaic_ragged_page_attention import FEW_TOKENS, check, computed, launches, step, wide  # noqa: F401

pytestmark = ON_HOPPER
PAGES = ("float8_e4m3fn", "int8")
POISON = 124  # what `step` has in integers that nothing may read


def scales(*shape, seed=1):
    """Factors of keys and values, of all or of each head; those of keys may be negative."""
    rng = np.random.default_rng(seed)
    k, v = rng.choice([-1, 1], shape) * rng.uniform(0.1, 0.6, shape), rng.uniform(0.2, 3, shape)
    return dict(k_scale=jnp.asarray(k, jnp.float32), v_scale=jnp.asarray(v, jnp.float32))


def scales_of_slots(x):
    """Of every slot and head, NaN where nothing is read."""
    first = wide(x["kv_pages"][:, :, ::2, :1])
    unread = np.isnan(first) | (first == POISON)
    return {name: jnp.where(unread[..., 0], jnp.nan, scale) for name, scale in scales(*unread.shape[:3]).items()}


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("d, page", [(64, 16), (64, 128), (128, 16), (128, 64), (192, 32), (256, 16), (256, 128)])
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_features_and_pages(dtype, pages, d, page):
    check(step(d=d, page=page, dtype=dtype, pages_dtype=pages) | scales(2))


@pytest.mark.parametrize("d, page", [(64, 16), (128, 16), (128, 64), (128, 256), (192, 32), (256, 16), (256, 128)])
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("given", ("both", "k_scale", "v_scale"))
def test_scales_of_slots(given, pages, d, page):
    x = step(d=d, page=page, pages_dtype=pages)
    of_slots, of_all = scales_of_slots(x), scales()
    check(x | (of_slots if given == "both" else of_all | {given: of_slots[given]}))


@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("options", [{}, dict(num_splits=5, window=300), dict(softcap=20.0)], ids=str)
def test_tiles_of_one_warpgroup(options, pages, d):
    x = step(d=d, lengths=FEW_TOKENS, window=options.get("window"), pages_dtype=pages)
    check(x | scales(), **options)
    check(x | scales_of_slots(x), **options)


OPTIONS = [
    dict(window=300),
    dict(softcap=20.0),
    dict(batch_invariant=True),
    dict(num_splits=3),
    dict(softmax_scale=0.3),
]


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("pages", (*PAGES, "bfloat16"))
@pytest.mark.parametrize("given", ({}, scales(), scales(2)), ids=("none", "one", "of heads"))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_and_scales(options, given, pages):
    sinks = jnp.asarray(np.random.default_rng(2).standard_normal((8, 2)) + 4, jnp.float32)
    x = step(window=options.get("window"), pages_dtype=pages)
    check(x | given | dict(sinks=sinks), **options)


@pytest.mark.parametrize("d", BLOCKS)
@pytest.mark.parametrize("pages", PAGES)
def test_drafts_continue_the_softmax(pages, d):
    x = step(d=d, pages_dtype=pages)
    mask = np.random.default_rng(2).random((len(x["q"]), 20)) < 0.6
    check(x | scales(2) | dict(draft_mask=jnp.asarray(mask)))


@pytest.mark.parametrize("pages", PAGES)
def test_many_sequences(pages):
    """More work tiles than multiprocessors, of every length, and copies ahead of each."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 160, 60)
    contexts = lengths + rng.integers(-5, 2000, 60).clip(-lengths)
    check(step(16, 4, page=16, lengths=lengths, contexts=contexts, pages_dtype=pages) | scales(4))


def test_every_number():
    """All of e4m3 that are numbers, and all integers, as values: their means, as the keys are zeros."""
    for pages, dtype in (("float8_e4m3fn", jnp.float8_e4m3fn), ("int8", jnp.int8)):
        x = step(h=8, g=1, lengths=(512,), contexts=(512,), pages_dtype=pages)
        numbers = np.arange(512 * 128, dtype=np.uint32).reshape(512, 128).astype(np.uint8).view(dtype)
        numbers = np.where(np.isnan(numbers.astype(np.float32)), 0, numbers.astype(np.float32))
        kv = np.asarray(x["kv_pages"]).astype(np.float32)
        table = np.asarray(x["block_tables"][0][:8])
        kv[table, :, 1] = numbers.reshape(8, 64, 128)
        kv[table, :, 0] = 0
        x["kv_pages"] = jnp.asarray(kv, dtype)
        o = wide(computed(x)[0])[:512]
        wanted = np.cumsum(numbers.astype(np.float64), 0) / np.arange(1, 513)[:, None]
        np.testing.assert_allclose(o, np.broadcast_to(wanted[:, None], o.shape), rtol=2**-7, atol=0.3)


def test_a_rerun_has_the_same_bits():
    x = step(32, 8, page=16, pages_dtype="float8_e4m3fn")
    first = computed(x)
    for _ in range(20):
        for a, b in zip(first, computed(x), strict=True):
            np.testing.assert_array_equal(a, b)


def test_scales_of_slots_are_left_to_triton_in_float16():
    x = step(pages_dtype="int8", dtype="float16")
    assert "k_scale of slots with q in float16" in str(
        ejkernel.explain("ragged_page_attention", **x | scales_of_slots(x))
    )


def test_v3_writes_in_place():
    x, rng = step(pages_dtype="float8_e4m3fn"), np.random.default_rng(5)
    x |= scales(2)
    k, v = (jnp.asarray(rng.standard_normal((len(x["q"]), 2, 128)), jnp.bfloat16) for _ in range(2))
    assert "pallas/gpu with" in str(ejkernel.explain("ragged_page_attention_v3", **x, k=k, v=v))
    wanted = kernel_registry.get("ragged_page_attention_v3", platform="xla")(**x, k=k, v=v)
    o, pages = ejkernel.lax.ragged_page_attention_v3(**x, k=k, v=v)
    np.testing.assert_array_equal(wide(pages), wide(wanted[1]))
    np.testing.assert_array_equal(wide(o), wide(computed(x | dict(kv_pages=pages))[0]))
