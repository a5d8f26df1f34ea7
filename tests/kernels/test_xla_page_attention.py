"""page_attention in XLA against its definition in float64: each option, each kind of pages, and unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import page_attention

from .paged import CONTEXTS, MOVING, J, N, P, close
from .paged import decode_defined as defined
from .paged import decode_step as step


def check(x, tolerance=1e-6, config=None, **options):
    for found, wanted in zip(
        page_attention(**x, **options, return_lse=True, config=config), defined(x, **options), strict=True
    ):
        close(found, wanted, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0),
        dict(softmax_scale=-0.3),
        dict(num_splits=2),
        dict(num_splits=5, window=20),
        dict(config=dict(queries_per_block=4, keys_per_block=16)),
        dict(config=dict(queries_per_block=4, keys_per_block=8, num_splits=2), num_splits=3, window=13),
        dict(config=dict(queries_per_block=100, keys_per_block=800, num_splits=3)),
    ],
    ids=str,
)
def test_options(options):
    check(step(), **options)


@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (3, 1), (32, 2), (1, 1)])
@pytest.mark.parametrize("page", (8, 16, 24))
def test_heads_and_pages(h, g, page):
    check(step(h, g, page=page))


@pytest.mark.parametrize("sinks", [(6,), (6, 3)], ids=str)
@pytest.mark.parametrize("splits", (None, 3))
def test_sinks(sinks, splits):
    rng = np.random.default_rng(1)
    check(step() | dict(sinks=jnp.asarray(rng.standard_normal(sinks), jnp.float32)), num_splits=splits)


@pytest.mark.parametrize("pages", ("float32", "float8_e4m3fn", "int8"))
@pytest.mark.parametrize("scale", ("none", "number", "scalar", "heads", "slots"))
def test_quantised_pages(pages, scale):
    x, rng = step(pages=pages), np.random.default_rng(2)
    shape = dict(scalar=(), heads=(2,), slots=(P, 8, 2)).get(scale)
    if shape is not None:
        x |= {name: jnp.asarray(rng.uniform(0.1, 0.5, shape), jnp.float32) for name in ("k_scale", "v_scale")}
    check(x | (dict(k_scale=0.25, v_scale=2) if scale == "number" else {}))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("pages", ("same", "float8_e4m3fn", "int8"))
def test_half_precision(dtype, pages):
    check(step(dtype=dtype, pages=dtype if pages == "same" else pages), tolerance=1.5e-2)


@pytest.mark.parametrize("splits", (None, 2))
def test_keys_after_the_context_are_invisible(splits):
    """NaN in the slots and scales after each context and in queries of empty ones; any numbers in later entries."""
    x, page = step(), 8
    x["block_tables"] = jnp.arange(N * J, dtype=jnp.int32).reshape(N, J)
    pool = np.random.default_rng(0).standard_normal((N * J, page, 2, 16))
    x |= dict(k_pages=jnp.asarray(pool, jnp.float32), v_pages=jnp.asarray(2 * pool, jnp.float32))
    x |= {name: jnp.asarray(1 + np.abs(pool[..., 0]), jnp.float32) for name in ("k_scale", "v_scale")}
    used = (np.arange(J * page) < np.asarray(CONTEXTS)[:, None]).reshape(N * J, page)
    poison = lambda a: jnp.where(used.reshape(*used.shape, *(1,) * (a.ndim - 2)), a, jnp.nan)
    poisoned = {n: poison(a) if n.endswith(("pages", "scale")) else a for n, a in x.items()}
    poisoned["q"] = jnp.where((x["context_lens"] > 0)[:, None, None], x["q"], jnp.nan)
    held = np.arange(J) < -(-np.asarray(CONTEXTS) // page)[:, None]
    poisoned["block_tables"] = jnp.where(held, x["block_tables"], jnp.array([-1, 2**31 - 1, -(2**31), 7, N * J]))
    run = partial(page_attention, return_lse=True, num_splits=splits)
    jax.tree.map(np.testing.assert_array_equal, run(**poisoned), run(**x))


def test_contexts_beyond_the_table_and_below_zero():
    """Keys past a table that is too short are hidden; a negative length is 0."""
    x = step()
    x["context_lens"] = jnp.array([-5, 41, 2**31 - 1, 40, -(2**31), 45], jnp.int32)
    clamped = x | dict(context_lens=jnp.clip(x["context_lens"], 0, 40))
    jax.tree.map(np.testing.assert_array_equal, page_attention(**x), page_attention(**clamped))


@pytest.mark.parametrize("options", (dict(), dict(window=20), dict(num_splits=2)), ids=str)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_batch_invariant(options, dtype):
    """A sequence has the same bits alone, at any index of a step, in one of more blocks, and under vmap."""
    rng, x = np.random.default_rng(3), step(page=64, dtype=dtype, pages=dtype)
    order = rng.integers(0, N, 40)
    many = {n: a[order] if n in MOVING else a for n, a in x.items()}
    run = jax.jit(partial(page_attention, return_lse=True, batch_invariant=True, **options))
    found = run(**many)
    for n in range(N):
        alone = run(**{name: a[n : n + 1] if name in MOVING else a for name, a in x.items()})
        for one, all_of in zip(alone, found, strict=True):
            for place in np.flatnonzero(order == n):
                np.testing.assert_array_equal(one[0], all_of[place])
    mapped = jax.vmap(lambda q, of, table: run(**x | dict(q=q, context_lens=of, block_tables=table)))
    for one, both in zip(run(**x), mapped(*(jnp.stack([x[n]] * 2) for n in MOVING)), strict=True):
        np.testing.assert_array_equal(jnp.stack([one, one]), both)


def test_memory_is_that_of_a_block():
    """Neither the cache nor all pages in the tables are gathered at once."""
    n, pages, page, j, g, d = 64, 2048, 16, 256, 2, 64
    array = jax.ShapeDtypeStruct
    pool, table = array((pages, page, g, d), jnp.float32), array((n, j), jnp.int32)
    compiled = jax.jit(page_attention).lower(
        array((n, 4, d), jnp.float32), pool, pool, array((n,), jnp.int32), table
    ).compile()  # fmt: skip
    gathered = 2 * 16 * 256 * g * d * 4  # keys and values of 16 sequences, 256 of each
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 2 * gathered < pages * page * g * d * 4, (temporary, gathered)
