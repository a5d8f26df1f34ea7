"""The launch that makes the table of work tiles, by the interpreter, bit for bit against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")
from ejkernel.kernels._pallas.gpu.ragged_page_attention import work
from ejkernel.kernels._triton import _launch

from . import compiler, interpreter, work_tiles

TOKENS, KEYS = 300, 512


def steps(name: str, batches: int, n: int):
    """context_lens [b,n], query_start_loc [b,n + 1] and num_seqs [b,1]."""
    rng = np.random.default_rng(n + 10 * batches)
    context = rng.integers(0, 600, (batches, n))
    starts = np.sort(rng.integers(0, TOKENS, (batches, n + 1)), 1)
    count = np.full((batches, 1), n)
    if name == "no sequences":
        count[:] = 0
    elif name == "fewer sequences":
        count[:] = rng.integers(0, n + 1, (batches, 1))
    elif name == "equal contexts":
        context[:] = 77
    elif name == "all tokens":
        starts[:, 0], starts[:, -1] = 0, TOKENS
    elif name == "one long sequence":
        starts[:, 1:] = TOKENS
    elif name == "decodes alone":
        starts = 3 * np.arange(n + 1) + np.zeros((batches, 1), int)
    elif name == "anything":
        starts = rng.integers(-400, 800, (batches, n + 1))
        context, count = rng.integers(-400, 2**31 - 1, (batches, n)), rng.integers(-3, n + 4, (batches, 1))
        context[:, ::3] = -(2**31)
    return [jnp.asarray(x, jnp.int32) for x in (context, starts, count)]


NAMES = (
    "some tokens", "no sequences", "fewer sequences", "equal contexts", "all tokens", "one long sequence",
    "decodes alone", "anything",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "batches, n, block_q, least, left",
    [(1, 1, 16, 1, None), (1, 6, 32, 9, 100), (3, 1, 128, 9, None), (3, 4, 16, 1, 40), (1, 19, 1, 1, 0)],
)
def test_tables(name, batches, n, block_q, least, left, monkeypatch):
    check(steps(name, batches, n), block_q, least, left, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most_keys, least_decodes", [(2**31 - 1, 1), (300, 2), (300, 6)])
def test_decodes_beside_prefills(name, most_keys, least_decodes, monkeypatch):
    """Of up to so many keys, if there are enough and prefills too, and behind the tiles of all others."""
    check(steps(name, 2, 9), 16, 40, 100, monkeypatch, most_keys, least_decodes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", (None, 40))
def test_some_tokens_of_the_step_are_no_keys(name, left, monkeypatch):
    of_step = jnp.asarray(np.random.default_rng(3).integers(0, 40, (2, 5)), jnp.int32)
    check(steps(name, 2, 5), 16, 9, left, monkeypatch, of_step=of_step)


@pytest.mark.parametrize("name", ("fewer sequences", "equal contexts", "anything"))
def test_sequences_and_tiles_are_taken_in_blocks(name, monkeypatch):
    monkeypatch.setattr(work, "MOST_AT_ONCE", 8)
    monkeypatch.setattr(work, "TILES_AT_ONCE", 16)
    check(steps(name, 3, 5), 4, 5, 30, monkeypatch)
    check(steps(name, 3, 5), 4, 50, 30, monkeypatch, 500, 3)


@pytest.mark.parametrize("n", (1, 16, 3000))
def test_compiles(n, monkeypatch):
    step = steps("some tokens", 1, n)
    (launch,) = compiler.launches(monkeypatch, _launch, lambda: work.work_tiles(*step, TOKENS, 16, 9, 100, KEYS))
    assert not compiler.binary(launch, compiler.TARGETS["sm_90"]).spilled


def check(step, block_q, least, left, monkeypatch, *decodes, **how):
    options = TOKENS, block_q, least, left, KEYS, *decodes
    wanted, *counts = work_tiles.work_tiles(*step, *options, **how)
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "launch", interpreter.launch)
        found, *found_counts = work.work_tiles(*step, *options, **how)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype == jnp.int32
    assert jax.tree.map(jnp.shape, found_counts) == jax.tree.map(jnp.shape, counts)
    jax.tree.map(np.testing.assert_array_equal, found_counts, counts)
    total = int(counts[0][0])
    np.testing.assert_array_equal(found[:total], wanted[:total])
