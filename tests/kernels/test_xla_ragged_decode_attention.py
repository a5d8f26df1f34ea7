"""ragged_decode_attention in XLA against its definition in float64: each option, and unread entries."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import page_attention, ragged_decode_attention

from .paged import attended, close, wide

LENGTH, STARTS, ENDS = 50, (0, 3, 7, 10, 0, -4, 20), (50, 4, 30, 10, 99, 17, 5)


def step(h=6, g=2, d=16, e=24, dtype="float32"):
    rng, n = np.random.default_rng(0), len(STARTS)
    made = dict(q=(n, h, d), k=(n, LENGTH, g, d), v=(n, LENGTH, g, e))
    made = {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in made.items()}
    return made | dict(sequence_start=jnp.array(STARTS), sequence_end=jnp.array(ENDS))


def seen(window):
    j, ends = np.arange(LENGTH), np.minimum(ENDS, LENGTH)[:, None]
    return (j >= np.array(STARTS)[:, None]) & (j < ends) & (j >= ends - (window or LENGTH))


def check(x, tolerance=1e-6, config=None, window=None, num_splits=None, **options):
    how = dict(window=window, num_splits=num_splits, config=config, return_lse=True)
    found = ragged_decode_attention(**x, **options, **how)
    rows = zip(np.asarray(x["q"]), wide(x["k"]), wide(x["v"]), seen(window), strict=True)
    wanted = [attended(*row, sinks=x.get("sinks"), **options) for row in rows]
    for one, exact in zip(found, zip(*wanted, strict=True), strict=True):
        close(one, np.stack(exact), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(window=9),
        dict(softcap=2.0),
        dict(softmax_scale=-0.3),
        dict(num_splits=5, config=dict(queries_per_block=4, keys_per_block=3)),
        dict(config=dict(queries_per_block=3, keys_per_block=7), num_splits=3, window=13),
        dict(config=dict(queries_per_block=100, keys_per_block=100)),
    ],
    ids=str,
)
def test_options(options):
    check(step(), **options)


@pytest.mark.parametrize("h, g", [(4, 4), (16, 1), (3, 1), (32, 2), (1, 1)])
def test_heads(h, g):
    check(step(h, g))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_half_precision(dtype):
    check(step(dtype=dtype), tolerance=1.5e-2)


@pytest.mark.parametrize("sinks", [(6,), (6, 3)], ids=str)
def test_sinks(sinks):
    x = step() | dict(sinks=jnp.asarray(np.random.default_rng(1).standard_normal(sinks), jnp.float32))
    check(x), check(x, num_splits=2)


@pytest.mark.parametrize("splits", (None, 3))
def test_invisible_entries_may_be_nan(splits):
    x, used = step(), seen(None)[:, :, None, None]
    poisoned = x | {name: jnp.where(used, x[name], jnp.nan) for name in ("k", "v")}
    run = partial(ragged_decode_attention, return_lse=True, num_splits=splits)
    jax.tree.map(np.testing.assert_array_equal, run(**poisoned), run(**x))


def test_it_is_page_attention_where_a_cache_is_one_page_each():
    x = step()
    ends = jnp.clip(x["sequence_end"], 0, LENGTH)
    of_pages = page_attention(x["q"], x["k"], x["v"], ends, jnp.arange(len(ENDS))[:, None], window=9)
    close(ragged_decode_attention(**x | dict(sequence_start=0 * ends), window=9), of_pages)


def test_memory_is_that_of_a_block():
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    kv, ints = of(64, 4096, 2, 64), of(64, dtype=jnp.int32)
    compiled = jax.jit(ragged_decode_attention).lower(of(64, 4, 64), kv, kv, ints, ints).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    gathered = 2 * 16 * 256 * 2 * 64 * 4  # keys and values of 16 sequences, 256 of each
    assert temporary < 3 * gathered < 64 * 4096 * 2 * 64 * 4, (temporary, gathered)
