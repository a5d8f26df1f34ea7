"""The online softmax of Hopper's forward with a softcap, by its functions of tiles on plain arrays.

A warp is all 64 rows here: one number out of the range of the polynomial has all rows computed with tanh.
"""

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("jax.experimental.mosaic.gpu")

from ejkernel.kernels._pallas.gpu.flash_attention import tiles
from ejkernel.kernels._pallas.gpu.flash_attention.problem import LOG2_E
from ejkernel.kernels._pallas.gpu.flash_attention.tiles import COLUMNS, LIMITS, Statistics

ROWS, KEYS, V = 64, 128, 16


@pytest.fixture(autouse=True)
def arrays(monkeypatch):
    """Registers of a thread as columns of an array: a thread has every eighth number of a row."""
    by_thread = lambda reduced, x: reduced(x.reshape(*x.shape[:1], -1, COLUMNS), axis=1)
    monkeypatch.setattr(tiles, "thread_partial_row_sums", partial(by_thread, jnp.sum))

    def powers(x, coefficients, base):
        polynomial = sum(c * x ** (2 * n + 1) for n, c in enumerate(coefficients))
        return jnp.exp2(polynomial - base[:, None]), by_thread(jnp.max, x * x)

    monkeypatch.setattr(tiles, "powers_of_polynomial", powers)
    monkeypatch.setattr(tiles, "reciprocal", lambda x: 1 / x)
    monkeypatch.setattr(tiles, "broadcast_rows", lambda rows, like: rows[:, None])
    monkeypatch.setattr(tiles, "warp_any", lambda x, layout: jnp.any(x))


def problem(scale, softcap):
    return SimpleNamespace(scale=scale, softcap=softcap, exponent=LOG2_E * softcap)


def attention(qk, v, of):
    """softmax(softcap · tanh(scale · qk / softcap)) v in float32, a block of keys after the other, and lse."""
    first, *blocks = np.split(np.asarray(qk, np.float32), qk.shape[1] // KEYS, axis=1)
    values = np.split(np.asarray(v, np.float32), qk.shape[1] // KEYS)
    start = Statistics(jnp.full(ROWS, -jnp.inf), jnp.zeros((ROWS, COLUMNS)))
    p, found, _ = tiles.weights(tiles.logits(jnp.asarray(first), of), start, None, of.exponent, 0, LIMITS)
    acc = p @ values[0]
    for s, of_block in zip(blocks, values[1:], strict=True):
        acc, p, found = tiles.updated(acc, jnp.asarray(s), found, of.exponent, 0, LIMITS, lambda p: p, capped=of)
        acc += p @ of_block
    total = found.total.sum(1)
    return acc / total[:, None], (found.maximum + jnp.log2(total)) / LOG2_E


def exact(qk, v, of):
    s = of.softcap * np.tanh(of.scale * qk / of.softcap)
    weights = np.exp(s - s.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True), np.log(weights.sum(1)) + s.max(1)


@pytest.mark.parametrize("softcap", [2.0, 50.0, 1e3])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 60.0, 1e3])
def test_logits_in_and_out_of_the_range_of_the_polynomial(size, softcap):
    rng, of = np.random.default_rng(0), problem(0.125, softcap)
    qk, v = rng.standard_normal((ROWS, 4 * KEYS)) * size / of.scale, rng.standard_normal((4 * KEYS, V))
    (o, lse), (wanted_o, wanted_lse) = attention(qk, v, of), exact(qk.astype(np.float32), v, of)
    assert np.linalg.norm(o - wanted_o) <= 3e-4 * np.linalg.norm(wanted_o)
    np.testing.assert_allclose(lse, wanted_lse, rtol=3e-6, atol=3e-4)


@pytest.mark.parametrize("first, rest", [(-1e4, 1e4), (1e4, -1e4), (-1e4, -1e4), (0.0, -1e4), (-1e4, 0.0)])
def test_rows_at_both_ends_of_the_softcap(first, rest):
    """Where a polynomial would be far off: all weights of a block at the least logit, or at the greatest."""
    rng, of = np.random.default_rng(1), problem(1.0, 50.0)
    qk, v = np.full((ROWS, 3 * KEYS), rest), rng.standard_normal((3 * KEYS, V))
    qk[:, :KEYS] = first
    qk += rng.standard_normal(qk.shape)
    (o, lse), (wanted_o, wanted_lse) = attention(qk, v, of), exact(qk.astype(np.float32), v, of)
    np.testing.assert_allclose(o, wanted_o, atol=1e-4)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-4)


def test_the_range_is_told_by_thread():
    qk = np.zeros((ROWS, KEYS), np.float32)
    qk[5, 17], qk[9, 32] = 23.0, -22.0  # of a softcap of 50: 0.46 and 0.44 of it
    _, out_of_range = tiles.powers_of_softcap(jnp.asarray(qk), jnp.zeros(ROWS), problem(1.0, 50.0))
    assert np.argwhere(out_of_range).tolist() == [[5, 17 % COLUMNS]]


@pytest.mark.parametrize("softcap", [2.0, 30.0, 50.0, 100.0])
def test_the_polynomial_is_tanh(softcap):
    of = problem(0.1, softcap)
    most = min(tiles.MOST_OF_TANH * softcap, tiles.MOST_OF_LOGIT)
    qk = np.linspace(-most, most, ROWS * KEYS, dtype=np.float32).reshape(ROWS, KEYS) / np.float32(of.scale * (1 + 1e-6))
    logits = LOG2_E * softcap * np.tanh(of.scale * qk.astype(np.float64) / softcap)
    base = logits.max(1)
    p, out_of_range = tiles.powers_of_softcap(jnp.asarray(qk), jnp.asarray(base, jnp.float32), of)
    assert not out_of_range.any()
    np.testing.assert_allclose(p, np.exp2(logits - base[:, None]), rtol=4e-4 if most > 1 else 4e-5)
