"""A model of two layers with random weights, and the text that full forward passes without a cache generate."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.serving import Decoder, Engine, Limits, logits_of_text, random_weights

from .engines import LIMITS

LONGEST = 64


@pytest.fixture(scope="session")
def decoder():
    """One layer with a window and one without; two query heads for each head of the cache."""
    return Decoder(64, 32, 4, 2, 8, 64, (6, None), softcap=30.0)


@pytest.fixture(scope="session")
def weights(decoder):
    return random_weights(decoder, jax.random.key(0))


@pytest.fixture(scope="session")
def prompts():
    """Prompts of various lengths, from one token to more than any bucket of the tests."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, length).tolist() for length in (3, 1, 17, 9, 30, 5, 40)]


@pytest.fixture(scope="session")
def plain(decoder, weights):
    """(prompt, count, function from a text to its logits) → the greedy continuation."""
    of_text = jax.jit(lambda tokens: logits_of_text(decoder, weights, tokens))

    def continuation(prompt, count, of_text=of_text):
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(prompt)] = prompt
        for at in range(len(prompt), len(prompt) + count):
            tokens[0, at] = jnp.argmax(of_text(tokens)[0, at - 1])
        return tokens[0, len(prompt) : len(prompt) + count].tolist()

    return continuation


@pytest.fixture(scope="session")
def expected(plain, prompts):
    return [plain(prompt, 12) for prompt in prompts]


@pytest.fixture(scope="module")
def engine(decoder, weights):
    """An engine with these limits, shared by the tests: each must leave it as it was."""
    return cache(lambda **limits: Engine(decoder, weights, Limits(**{**LIMITS, **limits})))
