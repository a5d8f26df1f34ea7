"""ragged_page_attention in XLA against its definition in float64: each option, drafts, and unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import ragged_page_attention, ragged_page_attention_v3

from .paged import COUNT, PAGE, RAGGED_CONTEXTS, RAGGED_LENGTHS, TOKENS, J, P, close
from .paged import ragged_defined as defined
from .paged import ragged_step as step


def check(x, tolerance=1e-6, config=None, **options):
    found = ragged_page_attention(**x, **options, return_lse=True, config=config)
    for one, wanted in zip(found, defined(x, **options), strict=True):
        close(one, wanted, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0),
        dict(softmax_scale=-0.3),
        dict(num_splits=5, window=20),
        dict(config=dict(queries_per_block=4, pages_per_block=2)),
        dict(config=dict(queries_per_block=7, pages_per_block=1), num_splits=3, window=13),
        dict(config=dict(queries_per_block=100, pages_per_block=100)),
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", (0, pytest.param(3, marks=pytest.mark.slow), 12))
def test_options(options, drafts):
    x = step()
    if drafts:
        x["draft_mask"] = jnp.asarray(np.random.default_rng(1).random((TOKENS, drafts)) < 0.5)
    check(x, **options)


@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (3, 1), (32, 2), (1, 1)])
def test_heads(h, g):
    check(step(h, g))


@pytest.mark.parametrize("sinks", [(6,), (6, 3)], ids=str)
def test_sinks(sinks):
    x = step() | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32))
    check(x), check(x, num_splits=2)


@pytest.mark.parametrize("pages", ("float32", "float8_e4m3fn", "int8"))
@pytest.mark.parametrize("shape", ((), (2,), (P, PAGE, 2)), ids=str)
def test_quantised_pages(pages, shape):
    rng = np.random.default_rng(2)
    scales = {name: jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32) for name in ("k_scale", "v_scale")}
    check(step(pages=pages) | scales), check(step(pages=pages))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("pages", ("same", "float8_e4m3fn", "int8"))
def test_half_precision(dtype, pages):
    check(step(dtype=dtype, pages=dtype if pages == "same" else pages), tolerance=1.5e-2)


@pytest.mark.parametrize("count", range(7))
def test_any_number_of_sequences_in_one_program(count):
    """It may be traced, and table entries of other sequences may be anything."""
    x = step()
    there = jnp.arange(len(RAGGED_CONTEXTS)) < count
    rubbish = x | dict(
        context_lens=jnp.where(there, x["context_lens"], -7),
        block_tables=jnp.where(there[:, None], x["block_tables"], 2**31 - 1),
        query_start_loc=jnp.where(jnp.arange(7) <= count, x["query_start_loc"], -3),
        num_seqs=jnp.array([count]),
    )
    wanted = defined(x | dict(num_seqs=count))
    for found, exact in zip(jax.jit(partial(ragged_page_attention, return_lse=True))(**rubbish), wanted, strict=True):
        close(found, exact)


def test_no_sequence_at_all():
    """A step of padding alone, as an idle server runs it to compile a bucket."""
    for none in (0, jnp.zeros(1, jnp.int32)):
        o, lse = ragged_page_attention(**step() | dict(num_seqs=none), return_lse=True)
        assert not o.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("drafts", (False, True))
def test_keys_after_the_context_are_invisible(drafts):
    """NaN in the slots and scales after each context and in tokens of none, and any pages in tables after it."""
    x, contexts = step(), np.array(RAGGED_CONTEXTS)
    n = len(contexts)
    x["block_tables"] = jnp.arange(n * J, dtype=jnp.int32).reshape(n, J)
    pool = np.random.default_rng(0).standard_normal((n * J, PAGE, 4, 16))
    x |= dict(kv_pages=jnp.asarray(pool, jnp.float32))
    x |= {name: jnp.asarray(1 + np.abs(pool[:, :, :2, 0]), jnp.float32) for name in ("k_scale", "v_scale")}
    if drafts:
        x["draft_mask"] = jnp.asarray(np.random.default_rng(1).random((TOKENS, 4)) < 0.5)
    used = ((np.arange(J * PAGE) < contexts[:, None]) & (np.arange(n) < COUNT)[:, None]).reshape(n * J, PAGE)
    poison = lambda a: jnp.where(used.reshape(*used.shape, *(1,) * (a.ndim - 2)), a, jnp.nan)
    poisoned = {name: poison(a) if name.endswith(("pages", "scale")) else a for name, a in x.items()}
    poisoned["q"] = jnp.where((np.arange(TOKENS) < sum(RAGGED_LENGTHS[:COUNT]))[:, None, None], x["q"], jnp.nan)
    held = (np.arange(J) < -(-contexts // PAGE)[:, None]) & (np.arange(n) < COUNT)[:, None]
    poisoned["block_tables"] = jnp.where(held, x["block_tables"], jnp.array([-1, 2**31 - 1, -(2**31), 7, n * J]))
    run = partial(ragged_page_attention, return_lse=True)
    jax.tree.map(np.testing.assert_array_equal, run(**poisoned), run(**x))


def test_it_equals_the_third_version_after_its_write():
    """The third version takes the step's keys and values beside the pages into which it writes them."""
    x, rng = step(), np.random.default_rng(5)
    x["block_tables"] = jnp.asarray(rng.permutation(6 * J).reshape(6, J), jnp.int32)
    x["kv_pages"] = jnp.asarray(rng.standard_normal((6 * J, PAGE, 4, 16)), jnp.float32)
    new = {name: jnp.asarray(rng.standard_normal((TOKENS, 2, 16)), jnp.float32) for name in ("k", "v")}
    *wanted, pages = ragged_page_attention_v3(**x, **new, return_lse=True)
    found = ragged_page_attention(**x | dict(kv_pages=pages), return_lse=True)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


@pytest.mark.parametrize("options", (dict(), dict(window=20), dict(num_splits=2)), ids=str)
def test_batch_invariant(options):
    """A sequence has the same bits alone and in a step with others."""
    x = step()
    run = jax.jit(partial(ragged_page_attention, return_lse=True, batch_invariant=True, **options))
    found, starts = run(**x), np.cumsum([0, *RAGGED_LENGTHS])
    for n in range(COUNT):
        own = slice(starts[n], starts[n + 1])
        tables = {name: x[name][n : n + 1] for name in ("context_lens", "block_tables")}
        alone = run(
            **x | tables | dict(q=x["q"][own], query_start_loc=jnp.array([0, RAGGED_LENGTHS[n]]), num_seqs=jnp.int32(1))
        )
        for one, of_all in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one, of_all[own])


def test_memory_is_that_of_a_block():
    """Neither the cache nor all pages in the tables are gathered at once."""
    n, pages, page, j, g, d = 64, 2048, 16, 256, 2, 64
    of = lambda dtype: lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    ints, floats = of(jnp.int32), of(jnp.float32)
    arguments = floats(512, 4, d), floats(pages, page, 2 * g, d), ints(n), ints(n, j), ints(n + 1), ints(1)
    temporary = jax.jit(ragged_page_attention).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    gathered = 16 * 256 * 2 * g * d * 4  # keys and values of 16 tokens, 256 of each
    assert temporary < 3 * gathered < pages * page * 2 * g * d * 4, (temporary, gathered)
