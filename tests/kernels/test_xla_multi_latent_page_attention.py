"""multi_latent_page_attention in XLA against its definition in float64, and against its expanded form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import flash_attention, multi_latent_page_attention

from .latent_pages import COUNT, LATENT, LENGTHS, PAGE, ROPE, TOKENS, P, defined, lists, poisoned, step, tree, unnamed
from .paged import close


def check(x, tolerance=1e-6, config=None, **options):
    found = multi_latent_page_attention(**x, **options, return_lse=True, config=config)
    for one, wanted in zip(found, defined(x, **options), strict=True):
        close(one, wanted, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0),
        dict(softmax_scale=0.3),
        dict(config=dict(queries_per_block=7, pages_per_block=1), num_splits=3, window=13),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", (0, 3))
def test_options(options, drafts):
    x = step()
    if drafts:
        x["draft_mask"] = tree(drafts)
    check(x, **options)


@pytest.mark.parametrize("h", (1, 16, 128))
def test_heads_and_sinks(h):
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal((h, 2)), jnp.float32)
    check(step(h)), check(step(h) | dict(sinks=sinks))


@pytest.mark.parametrize("pages", ("float32", "float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", (None, (), (1,), (P, PAGE, 1)), ids=str)
def test_quantised_pages(pages, shape):
    x = step(pages=pages)
    if shape is not None:
        x["k_scale"] = jnp.asarray(np.random.default_rng(2).uniform(0.1, 0.5, shape), jnp.float32)
    check(x, tolerance=2e-6)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("pages", ("same", "float8_e4m3fn", "int8"))
def test_half_precision(dtype, pages):
    check(step(dtype=dtype, pages=dtype if pages == "same" else pages), tolerance=1.5e-2)


def test_keys_after_the_context_are_invisible():
    x, with_nan = poisoned(step())
    run = partial(multi_latent_page_attention, return_lse=True)
    jax.tree.map(np.testing.assert_array_equal, run(**with_nan), run(**x))


def test_it_is_attention_of_heads_whose_projections_are_absorbed():
    """As in DeepSeek-V2: keys and values are projected from latents, and all heads share the rotary part."""
    rng, (s, h, dn, dv) = np.random.default_rng(3), (20, 4, 16, 12)
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, q_rope, latent, k_rope = array(s, h, dn), array(s, h, ROPE), array(s, LATENT), array(s, ROPE)
    w_kc, w_vc = array(LATENT, h, dn), array(LATENT, h, dv)
    product = partial(jnp.einsum, precision="highest")
    k = jnp.concatenate(
        [product("jr,rhd->jhd", latent, w_kc), jnp.broadcast_to(k_rope[:, None], (s, h, ROPE))], axis=-1
    )
    v = product("jr,rhd->jhd", latent, w_vc)
    wanted = flash_attention(jnp.concatenate([q, q_rope], axis=-1)[None], k[None], v[None], causal=True)[0]
    pages = jnp.concatenate([latent, k_rope], axis=-1)
    pages = jnp.pad(pages, ((0, -s % PAGE), (0, 0)), constant_values=jnp.nan).reshape(-1, PAGE, LATENT + ROPE)
    o = multi_latent_page_attention(
        product("ihd,rhd->ihr", q, w_kc),
        q_rope,
        pages,
        jnp.array([s]),
        jnp.arange(len(pages))[None],
        jnp.array([0, s]),
        1,
        softmax_scale=(dn + ROPE) ** -0.5,
    )
    close(product("ihr,rhd->ihd", o, w_vc), wanted, tolerance=2e-5)


def test_batch_invariant():
    x = step()
    run = jax.jit(partial(multi_latent_page_attention, return_lse=True, batch_invariant=True))
    found, starts = run(**x), np.cumsum([0, *LENGTHS])
    for n in range(COUNT):
        own = slice(starts[n], starts[n + 1])
        alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        alone |= {name: x[name][own] for name in ("q_latent", "q_rope")}
        of_one = run(**x | alone | dict(query_start_loc=jnp.array([0, LENGTHS[n]]), num_seqs=jnp.int32(1)))
        for one, of_all in zip(of_one, found, strict=True):
            np.testing.assert_array_equal(one, of_all[own])


# --- Lists of keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0, softmax_scale=0.3),
        dict(config=dict(queries_per_block=7, pages_per_block=1), num_splits=3, window=13),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", (0, 3))
@pytest.mark.parametrize("keys", (1, 21))
def test_lists_of_keys(options, drafts, keys):
    x = step()
    x |= dict(indices=lists(keys, x)) | (dict(draft_mask=tree(drafts)) if drafts else {})
    check(x, **options)


@pytest.mark.parametrize("pages", ("float32", "float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", (None, (), (P, PAGE, 1)), ids=str)
def test_lists_of_quantised_keys_with_sinks(pages, shape):
    x, rng = step(pages=pages), np.random.default_rng(2)
    x |= dict(indices=lists(21, x), sinks=jnp.asarray(rng.standard_normal((4, 2)), jnp.float32))
    if shape is not None:
        x["k_scale"] = jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32)
    check(x, tolerance=2e-6)


def test_a_list_of_all_keys_is_attention_to_all():
    """In any order, and with more entries than keys."""
    x = step()
    everything = np.random.default_rng(0).permutation(np.r_[: x["block_tables"].shape[1] * PAGE, -1, 2**31 - 1])
    of_lists = multi_latent_page_attention(**x, indices=np.tile(everything, (TOKENS, 1)), return_lse=True)
    for one, wanted in zip(of_lists, multi_latent_page_attention(**x, return_lse=True), strict=True):
        close(one, wanted)


def test_an_empty_list_gives_zero_and_no_weight():
    x = step()
    o, lse = multi_latent_page_attention(**x, indices=jnp.full((TOKENS, 3), -1), return_lse=True)
    assert (o == 0).all() and (lse == -jnp.inf).all()
    sinks = jnp.arange(4.0)
    o, lse = multi_latent_page_attention(**x, indices=jnp.full((TOKENS, 3), -1), sinks=sinks, return_lse=True)
    assert (o == 0).all()
    close(lse[: LENGTHS[0]], jnp.broadcast_to(sinks, (LENGTHS[0], 4)))


@pytest.mark.parametrize("dtype, large", ((np.int16, 2**15 - 1), (np.uint32, 2**31 + 3)))
def test_positions_of_any_integer_type(dtype, large):
    """Large ones do not wrap around."""
    x = step()
    named = np.asarray(lists(21, x))
    check(x | dict(indices=np.where(named < 0, large, named.astype(np.int64)).astype(dtype)))


def test_unlisted_keys_may_be_nan():
    x, with_nan = unnamed(step(), lists(5, step()))
    run = partial(multi_latent_page_attention, return_lse=True)
    jax.tree.map(np.testing.assert_array_equal, run(**with_nan), run(**x))


def test_lists_are_batch_invariant():
    x = step()
    x |= dict(indices=lists(21, x))
    run, starts = jax.jit(partial(multi_latent_page_attention, return_lse=True, batch_invariant=True)), [0, 9, 10]
    found = run(**x)
    for n in range(2):
        own = slice(starts[n], starts[n + 1])
        alone = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        alone |= {name: x[name][own] for name in ("q_latent", "q_rope", "indices")}
        alone |= dict(query_start_loc=jnp.array([0, LENGTHS[n]]), num_seqs=jnp.int32(1))
        for one, of_all in zip(run(**x | alone), found, strict=True):
            np.testing.assert_array_equal(one, of_all[own])


def test_memory_of_lists_is_that_of_a_block():
    """2048 of 65536 keys for each of 512 tokens: neither all pairs nor all listed latents are in memory at once."""
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    ints, floats = of(jnp.int32), of(jnp.float32)
    arguments = floats(512, 4, 512), floats(512, 4, 64), floats(4096, 16, 576), ints(1), ints(1, 4096), ints(2)
    compiled = jax.jit(multi_latent_page_attention).lower(*arguments, ints(1), indices=ints(512, 2048)).compile()
    gathered, queries, named = 2 * 16 * 256 * 576 * 4, 2 * 512 * 4 * (576 + 512) * 4, 5 * 512 * 2048 * 4
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < gathered + queries + named < 512 * 65536 * 4, (temporary, gathered, queries, named)


def test_memory_is_that_of_a_block():
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    ints, floats = of(jnp.int32), of(jnp.float32)
    arguments = floats(512, 4, 512), floats(512, 4, 64), floats(2048, 16, 576), ints(64), ints(64, 256), ints(65)
    compiled = jax.jit(multi_latent_page_attention).lower(*arguments, ints(1)).compile()
    temporary, gathered = compiled.memory_analysis().temp_size_in_bytes, 2 * 16 * 256 * 576 * 4
    queries = 2 * 512 * 4 * (576 + 512) * 4
    assert temporary < 2 * gathered + queries < 2048 * 16 * 576 * 4, (temporary, gathered)
