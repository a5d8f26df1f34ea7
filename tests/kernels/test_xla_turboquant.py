"""The operations over a TurboQuant cache in XLA against their definition in float64, and bytes that must not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import ragged_page_attention_v2_turboquant, ragged_page_attention_v3_turboquant

from .paged import COUNT, PAGE, RAGGED_CONTEXTS, RAGGED_LENGTHS, TOKENS, J, close, wide
from .quantised_pages import NORMS, POOLS, defined, poisoned, step, unread_slots, with_strangers

P = len(RAGGED_CONTEXTS) * J
WRITTEN = [
    (n, context - length + i)
    for n, (context, length) in enumerate(zip(RAGGED_CONTEXTS, RAGGED_LENGTHS, strict=True))
    for i in range(length)
]


# --- The definition ---------------------------------------------------------------------------------------------------


def quantised(k, book, x):
    """The indices, the residual and the norm of one key or value in float64."""
    norm = np.linalg.norm(k)
    rotated = wide(x["rotation_matrix"]) @ (k / (norm or 1))
    index = np.abs(rotated[:, None] - wide(book)).argmin(1)
    return index, rotated - wide(book)[index], norm


def in_bytes(index):
    return (index[0::2] + 16 * index[1::2]).astype(np.uint8)


def written(x, new):
    """The pools after the step, by NumPy, one token and head at a time."""
    pools, starts = {name: np.array(x[name]) for name in POOLS}, np.asarray(x["query_start_loc"])
    places = [(n, p) for n, p in WRITTEN if n < COUNT]
    for token, (n, p) in enumerate(places):
        assert starts[n] <= token < starts[n + 1]
        if p < 0:
            continue
        slot = int(x["block_tables"][n, p // PAGE]), p % PAGE
        for head in range(new["k"].shape[1]):
            index, r, norm = quantised(wide(new["k"][token, head]), x["key_codebook"], x)
            pools["key_indices_pages"][*slot, head] = in_bytes(index)
            signs = wide(x["qjl_projection"]) @ r >= 0
            pools["key_signs_pages"][*slot, head] = np.packbits(signs, bitorder="little")
            pools["key_norms_pages"][*slot, head] = norm, np.linalg.norm(r)
            index, _, norm = quantised(wide(new["v"][token, head]), x["value_codebook"], x)
            pools["value_indices_pages"][*slot, head], pools["value_norms_pages"][*slot, head] = in_bytes(index), norm
    return pools


# --- What is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0),
        dict(softmax_scale=-0.3),
        dict(config=dict(queries_per_block=4, pages_per_block=2)),
        dict(config=dict(queries_per_block=7, pages_per_block=1), window=13),
        dict(config=dict(queries_per_block=100, pages_per_block=100)),
    ],
    ids=str,
)
def test_options(options):
    x, _ = step()
    found = ragged_page_attention_v2_turboquant(**x, **options, return_lse=True)
    options = {name: a for name, a in options.items() if name != "config"}
    for one, wanted in zip(found, defined(x, **options), strict=True):
        close(one, wanted)


@pytest.mark.parametrize("number", range(2, 5))
@pytest.mark.parametrize("norms", ("bfloat16", "float32"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_bits_and_dtypes(number, norms, dtype):
    x, _ = step(dtype=dtype, norms=norms, bits=number)
    found = ragged_page_attention_v2_turboquant(**x, return_lse=True)
    for one, wanted in zip(found, defined(x), strict=True):
        close(one, wanted, 1e-6 if one.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("sinks", [(6,), (6, 3)], ids=str)
def test_sinks(sinks):
    x, _ = step()
    x["sinks"] = jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32)
    for one, wanted in zip(ragged_page_attention_v2_turboquant(**x, return_lse=True), defined(x), strict=True):
        close(one, wanted)


def test_keys_after_the_context_are_invisible():
    """NaN norms in the slots after each context, NaN in tokens of no sequence, and any pages in tables after it."""
    x, new = step()
    strange, unread = with_strangers(x), unread_slots(x)
    of_some = (np.arange(TOKENS) < sum(RAGGED_LENGTHS[:COUNT]))[:, None, None]
    both = {name: jnp.where(of_some, a, jnp.nan) for name, a in new.items()}
    run = partial(ragged_page_attention_v2_turboquant, return_lse=True)
    jax.tree.map(np.testing.assert_array_equal, run(**strange), run(**x))
    run = partial(ragged_page_attention_v3_turboquant, return_lse=True)
    found, wanted = run(**strange, **both), run(**x, **new)
    jax.tree.map(np.testing.assert_array_equal, found[:2], wanted[:2])
    for name, a, b in zip(POOLS, found[2:], wanted[2:], strict=True):
        np.testing.assert_array_equal(wide(a), wide(poisoned(b, unread) if name in NORMS else b))


# --- What is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(2, 5))
def test_the_whole_pool_byte_for_byte(number):
    """Written bytes are those of the definition, and all other bytes of the pools are unchanged."""
    x, new = step(bits=number)
    found = jax.jit(ragged_page_attention_v3_turboquant)(**x, **new)[1:]
    for name, a, wanted in zip(POOLS, found, written(x, new).values(), strict=True):
        np.testing.assert_array_equal(wide(a), wide(wanted), err_msg=name)
        assert (wide(a) != wide(x[name])).any() and a.dtype == x[name].dtype


def test_a_token_without_a_page_is_written_nowhere():
    """Its page is not in the pools, or its position is past the table."""
    x, new = step()
    x["block_tables"] = jnp.full_like(x["block_tables"], P).at[0].set(-1)
    x["context_lens"] = x["context_lens"].at[1].set(J * PAGE + 1)
    found = ragged_page_attention_v3_turboquant(**x, **new)[1:]
    for name, a in zip(POOLS, found, strict=True):
        np.testing.assert_array_equal(wide(a), wide(x[name]))


def test_a_key_of_zeros_is_zeros():
    """And its logit is 0; the largest and smallest numbers have their norms."""
    x, new = step()
    scale = jnp.asarray([0.0, 1e-30, 1e30])[jnp.arange(TOKENS) % 3][:, None, None]
    new = {name: a * scale for name, a in new.items()}
    x |= {name: x[name].astype(jnp.float32) for name in POOLS if name.endswith("norms_pages")}
    found = dict(zip(POOLS, ragged_page_attention_v3_turboquant(**x, **new)[1:], strict=True))
    for name, wanted in written(x, new).items():
        if name.endswith("norms_pages"):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-6)
        else:
            np.testing.assert_array_equal(found[name], wanted, err_msg=name)


@pytest.mark.slow
def test_the_third_version_is_the_second_after_writing():
    x, new = step()
    *wanted, _, _, _, _, _ = found = ragged_page_attention_v3_turboquant(**x, **new, return_lse=True)
    after = x | dict(zip(POOLS, found[2:], strict=True))
    jax.tree.map(
        np.testing.assert_array_equal, list(ragged_page_attention_v2_turboquant(**after, return_lse=True)), wanted
    )


def test_memory_is_that_of_a_block():
    """Neither the pools nor all pages in the tables are gathered at once."""
    n, pages, page, j, g, d = 64, 2048, 16, 256, 2, 64
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    ints, floats, pool, norm = of(jnp.int32), of(jnp.float32), of(jnp.uint8), of(jnp.bfloat16)
    slots = pages, page, g
    cache = pool(*slots, d // 2), pool(*slots, d // 8), norm(*slots, 2), pool(*slots, d // 2), norm(*slots)
    rest = ints(n), ints(n, j), ints(n + 1), ints(1), floats(d, d), floats(d, d), floats(8), floats(16)
    q, kv = floats(512, 4, d), floats(512, g, d)
    call = jax.jit(ragged_page_attention_v3_turboquant, donate_argnums=range(3, 8))
    temporary = call.lower(q, kv, kv, *cache, *rest).compile().memory_analysis().temp_size_in_bytes
    block = 16 * 256 * g * (2 * d + d) * 4  # keys with their signs, and values, of 16 tokens, 256 of each
    assert temporary < 3 * block < pages * page * g * 3 * d * 4, (temporary, block)
