"""Philox against the known answers that are published with Random123 (kat_vectors, philox4x32 with ten rounds)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.xla_utils.philox import philox_4x32

KNOWN_ANSWERS = {
    "zeros": ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "pi": ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


def words(text):
    return tuple(jnp.uint32(int(word, 16)) for word in text.split())


@pytest.mark.parametrize("counter, key, answer", KNOWN_ANSWERS.values(), ids=KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert jax.jit(philox_4x32)(words(counter), words(key)) == words(answer)


def test_broadcasts_like_the_outer_product_of_single_draws():
    rng = np.random.default_rng(0)
    i, j, k0, k1 = (jnp.asarray(rng.integers(0, 2**32, n, dtype=np.uint32)) for n in (3, 5, 1, 1))
    together = philox_4x32((j[None, :], i[:, None], jnp.uint32(1), jnp.uint32(2)), (k0, k1))[0]
    for row in range(3):
        for column in range(5):
            alone = philox_4x32((j[column], i[row], jnp.uint32(1), jnp.uint32(2)), (k0[0], k1[0]))[0]
            assert together[row, column] == alone


def test_words_are_uniform():
    draws = np.asarray(philox_4x32((jnp.arange(2**16, dtype=jnp.uint32), *words("0 1 2")), words("3 4"))[0])
    counts = np.bincount(draws >> 28, minlength=16)
    assert abs(counts - 2**12).max() < 5 * 2**6  # five standard deviations of a bin
