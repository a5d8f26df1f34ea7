"""ragged_page_attention with a mask of drafts, in Triton by the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from kernels.paged import hidden_slots, ragged, wide

triton = pytest.importorskip("triton")
import ejkernel  # noqa: E402
from ejkernel.kernels._registry import kernel_registry  # noqa: E402
from ejkernel.kernels._triton import _paged  # noqa: E402
from ejkernel.kernels._triton import ragged_page_attention as attention  # noqa: E402
from ejkernel.kernels._triton._paged import drafts as of_masks  # noqa: E402
from ejkernel.modules._operation import OPERATIONS  # noqa: E402

from .test_triton_paged import computed, interpreted, operands_of  # noqa: E402, F401


@pytest.mark.parametrize("pages", ("float16", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)))
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), dict(window=50)], ids=str)
@pytest.mark.parametrize("num_splits", (1, None, pytest.param(3, marks=pytest.mark.slow)))
def test_keys_of_the_cache_have_larger_tiles_than_drafts(num_splits, options, pages, monkeypatch):
    """Of any number modulo both tiles; of sequences of many tokens, of one, and of more tokens than keys.

    Without splits, with a plan of them, and with three.
    """
    monkeypatch.setattr(_paged, "prefill_sizes", lambda x: (_paged.TileConfig(32, 64, 4, 1),))
    x = ragged((23, 1, 20, 0, 9), (140, 65, 60, 8, 5), h=2, d=32, drafts=21)
    x |= dict(q=x["q"].astype(jnp.float16), kv_pages=x["kv_pages"].astype(pages))
    plan = None
    if num_splits is None:
        of = dict(page_size=8, num_tokens=len(x["q"]), workers=7, drafts=21, **options)
        plan = ejkernel.lax.page_plan(x["context_lens"], x["query_start_loc"], **of)[None]
    operands, spec = operands_of("ragged_page_attention", x, plan, **options)
    found, wanted = computed("ragged_page_attention", operands, spec, keys_per_block=64, num_splits=num_splits or 1)
    assert_close(found, wanted, 2e-3)


@pytest.mark.parametrize("lengths", ((9, 1, 4, 6, 0, 40, 5), (90, 1, 4, 6, 0, 70, 5)), ids=("few", "many"))
@pytest.mark.parametrize("options", ({}, dict(softcap=2.0), dict(window=9), dict(window=60)), ids=str)
def test_drafts_continue_the_softmax_of_a_prefill(options, lengths):
    """That has the cached keys and sinks of sequences of more than 4 tokens, one of which has more tokens than keys."""
    x = ragged(lengths, (110, 17, 40, 3, 8, 77, 5), h=8, drafts=75)
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal(8), jnp.float32)
    x, spec = operands_of("ragged_page_attention", x | dict(sinks=sinks), **options)
    of = kernel_registry.find("ragged_page_attention", "xla").implementation
    of_cached, wanted = (of(*x._replace(draft_mask=mask), spec=spec) for mask in (x.draft_mask & False, x.draft_mask))
    config = OPERATIONS["ragged_page_attention"].config_class(keys_per_block=16, num_splits=2)
    found = attention.attended(x, spec, config, lambda most: (of_cached._asdict(), None), 4)
    assert_close(found, wanted, 2e-6)
    assert_close(attention.with_drafts(x, spec, of_cached), wanted, 2e-6)


LENGTHS, CONTEXTS = (90, 1, 40, 6, 0, 5), (110, 17, 70, 3, 8, 5)
PREFIXES = (90, 1, 33, 2, 0, 0)


def masked_as_without(prefixes, drafts, seed=0):
    """[tokens, drafts]: of each sequence so many drafts are seen as without a mask, and others at random."""
    rng, rows = np.random.default_rng(seed), []
    for length, prefix in zip(LENGTHS, prefixes, strict=True):
        w, t = np.arange(drafts), np.arange(length)[:, None]
        tree = rng.random((length, drafts)) < 0.5
        if prefix < min(length, drafts):
            tree[0, prefix] = prefix > 0
            tree[-1, prefix] = False
        rows.append(np.where(w < prefix, w <= t, tree))
    return np.concatenate([*rows, rng.random((3, drafts)) < 0.5])


@pytest.mark.parametrize("drafts", (5, 64, 100))
def test_drafts_that_are_seen_as_without_a_mask_are_counted(drafts, monkeypatch):
    """Of sequences that count, whatever the starts of others are; drafts behind a sequence are none of it."""
    monkeypatch.setattr(of_masks, "LEAST_TOKENS_OF_PREFILLS", 1)
    starts = np.cumsum([0, *LENGTHS])
    mask = masked_as_without(PREFIXES, drafts)
    for count, last in ((6, starts[-1]), (3, 7), (0, -4)):
        given = np.where(np.arange(7) <= count, starts, last)
        words = of_masks.in_words(jnp.asarray(mask)[None])
        found = of_masks.causal_drafts(words, jnp.asarray(given, jnp.int32)[None], jnp.asarray([[count]]))[0]
        for n in range(count):
            shown, length = mask[starts[n] : starts[n + 1]], LENGTHS[n]
            causal = np.arange(drafts) <= np.arange(length)[:, None]
            same = (shown == causal)[:, : min(length, drafts)].all(0)
            first = len(same) if same.all() else int(np.argmin(same))
            assert min(int(found[n]), length, drafts) == first == min(PREFIXES[n], drafts, length)


@pytest.mark.parametrize("options", ({}, dict(softcap=2.0), dict(window=9), dict(window=60)), ids=str)
def test_drafts_follow_those_of_a_prefill_without_a_mask(options, monkeypatch):
    """Rows without others are left as they are."""
    monkeypatch.setattr(of_masks, "LEAST_TOKENS_OF_PREFILLS", 1)
    mask = masked_as_without(PREFIXES, 100)
    x = ragged(LENGTHS, CONTEXTS, h=8, drafts=100) | dict(draft_mask=jnp.asarray(mask))
    x, spec = operands_of("ragged_page_attention", x, **options)
    of = kernel_registry.find("ragged_page_attention", "xla").implementation
    prefix = np.append(np.repeat(PREFIXES, LENGTHS), [0] * 3)[:, None]
    before = of(*x._replace(draft_mask=x.draft_mask & (np.arange(100) < prefix)), spec=spec)
    found = attention.with_drafts(x, spec, before)
    assert_close(found, of(*x, spec=spec), 2e-6)
    first = LENGTHS[0] + LENGTHS[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0, :first], b[0, :first]), found, before)


@pytest.mark.parametrize("window", (None, 3))
@pytest.mark.parametrize("dtype, pages", [("float32", "float32"), ("bfloat16", "float8_e4m3fn")])
def test_an_invisible_draft_may_be_nan(dtype, pages, window):
    """Because no mask names it, or only for tokens whose window it is outside of, or which are in no context."""
    x = ragged((5, 1, 3), (20, 13, 1), d=32, drafts=5, seed=2)
    x["draft_mask"] = x["draft_mask"].at[:, 1].set(False).at[5].set(False)
    x["block_tables"] = jnp.arange(x["block_tables"].size).reshape(x["block_tables"].shape)
    scales = np.random.default_rng(1).uniform(0.5, 1.5, (2, *x["kv_pages"].shape[:2], 2))
    x |= dict(zip(("k_scale", "v_scale"), jnp.asarray(scales, jnp.float32), strict=True))
    x |= dict(q=x["q"].astype(dtype), kv_pages=x["kv_pages"].astype(pages))
    hidden = jnp.asarray(hidden_slots(x, window))[..., None]
    assert hidden[2, 0] or window is None  # of the last sequence, whose first two tokens are in no context
    with_nan = {name: jnp.where(hidden, jnp.nan, x[name]) for name in ("k_scale", "v_scale")}
    with_nan["kv_pages"] = jnp.where(hidden[..., None], jnp.asarray(jnp.nan, pages), x["kv_pages"])
    run = lambda x: computed("ragged_page_attention", *operands_of("ragged_page_attention", x, window=window))
    for found, clean in zip(run(x | with_nan), run(x), strict=True):
        assert np.isfinite(wide(found[0])).all()
        jax.tree.map(np.testing.assert_array_equal, found, clean)
