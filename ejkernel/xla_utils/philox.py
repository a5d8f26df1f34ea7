"""Philox-4x32-10: random words as a pure function of a counter and a key.

J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Dropout is drawn from
this function on every platform, so that which weights are kept does not depend on who computes them.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and √3 − 1


def philox_4x32(counter: tuple, key: tuple, rounds: int = 10) -> tuple:
    """Four words of 32 random bits for each counter.

    Args:
        counter: four uint32 arrays that broadcast against each other.
        key: two uint32 arrays that broadcast against the counter.
        rounds: ten in the standard generator.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(KEY_INCREMENTS[0]), k1 + np.uint32(KEY_INCREMENTS[1])
    return c0, c1, c2, c3


def two_words(words: Array) -> tuple[Array, Array]:
    """The two words of a Philox key from a key [n] uint32: its words if n is 2, otherwise a hash of them.

    The hash is Philox over blocks of four words, each keyed by two words of the previous result, first by n.
    """
    if words.shape[0] == 2:
        return words[0], words[1]
    key = jnp.uint32(words.shape[0]), jnp.uint32(0)
    padded = jnp.pad(words, (0, -words.shape[0] % 4))
    for block in padded.reshape(-1, 4):
        key = philox_4x32(tuple(block), key)[:2]
    return key


def _multiply(constant: int, x: ArrayLike) -> tuple:
    """The high and the low word of the 64-bit product, from products of 16-bit halves: JAX has no uint64 by default."""
    half, low_bits = np.uint32(16), np.uint32(0xFFFF)
    a1, a0 = np.uint32(constant >> 16), np.uint32(constant & 0xFFFF)
    x1, x0 = lax.shift_right_logical(x, half), x & low_bits
    cross = a1 * x0 + lax.shift_right_logical(a0 * x0, half)  # < 2³²: (2¹⁶ − 1)² + 2¹⁶ − 1
    middle = a0 * x1 + (cross & low_bits)
    high = a1 * x1 + lax.shift_right_logical(cross, half) + lax.shift_right_logical(middle, half)
    return high, np.uint32(constant) * x
