"""Sampling from the tokens that top_k and top_p leave, at the frequencies of the softmax, by a seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.serving import Sampling
from ejkernel.serving.sampling import Kind, SamplingArrays, sample

LOGITS = np.log(np.array([0.1, 0.4, 0.02, 0.3, 0.18], np.float32))


def drawn(count=4000, **options):
    """The share of each token among that many samples at different positions."""
    rows = (jnp.full(count, x) for x in Sampling(**options).of_arrays)
    temperature, top_k, top_p, seed = rows
    arrays = SamplingArrays(temperature.astype(jnp.float32), top_k, top_p.astype(jnp.float32), seed.astype(jnp.uint32))
    kind = Sampling(**options).kind
    tokens = jax.jit(sample, static_argnums=3)(jnp.tile(LOGITS, (count, 1)), jnp.arange(count), arrays, kind)
    return np.bincount(tokens, minlength=5) / count


@pytest.mark.parametrize(
    "options, shares",
    [
        (dict(), [0, 1, 0, 0, 0]),
        (dict(temperature=1.0), [0.1, 0.4, 0.02, 0.3, 0.18]),
        (dict(temperature=1e-37), [0, 1, 0, 0, 0]),
        (dict(temperature=0.5), np.square([0.1, 0.4, 0.02, 0.3, 0.18]) / 0.2928),
        (dict(temperature=1.0, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (dict(temperature=1.0, top_k=1), [0, 1, 0, 0, 0]),
        (dict(temperature=1.0, top_k=9), [0.1, 0.4, 0.02, 0.3, 0.18]),
        (dict(temperature=1.0, top_p=0.6), [0, 4 / 7, 0, 3 / 7, 0]),
        (dict(temperature=1.0, top_p=1e-6), [0, 1, 0, 0, 0]),
        (dict(temperature=1.0, top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7, 0]),  # 0.7 of the 0.88 that top_k leaves
    ],
)
def test_tokens_are_sampled_at_the_remaining_frequencies(options, shares):
    assert np.abs(drawn(**options) - shares).max() < 0.03


def test_the_same_seed_draws_the_same():
    assert (drawn(50, temperature=1.0, seed=3) == drawn(50, temperature=1.0, seed=3)).all()
    assert (drawn(50, temperature=1.0, seed=3) != drawn(50, temperature=1.0, seed=4)).any()


def test_a_request_draws_the_same_beside_more_demanding_ones():
    """A step uses the sampling kind of the most demanding of its requests: the others' samples do not change."""
    rows = [Sampling(), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2, top_k=2, top_p=0.9)]
    arrays = SamplingArrays(*map(jnp.array, zip(*(row.of_arrays for row in rows), strict=True)))
    of = lambda kind: np.stack([sample(jnp.tile(LOGITS, (3, 1)), jnp.full(3, i), arrays, kind) for i in range(40)])
    greedy, drawn, restricted = map(of, Kind)
    assert (greedy[:, 0] == drawn[:, 0]).all() and (drawn[:, :2] == restricted[:, :2]).all()
    assert set(restricted[:, 2]) == {1, 3} and len(set(drawn[:, 1])) > 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_p=0.0), "top_p is 0.0; it must be above 0"),
        (dict(seed=2**32), "seed is 4294967296"),
    ],
)
def test_invalid_sampling_parameters_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
