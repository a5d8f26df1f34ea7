"""Codes of 1 to 8 bits packed into words of 32 bits, as a stream of bits, lowest bits of a word first.

Code i begins at bit i·bits of the stream, and may continue in the lowest bits of the next word. The pattern repeats
after `period(bits)` codes, which fill whole words: 8 codes of 4 bits fill one, 32 codes of 3 bits fill three.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def period(bits: int) -> int:
    """The least number of codes that fills whole words."""
    return 32 // math.gcd(32, bits)


def _places(bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The word and the shift of each code of a period, and whether the code continues in the next word."""
    bit = np.arange(period(bits)) * bits
    return bit // 32, (bit % 32).astype(np.uint32), bit % 32 + bits > 32


def packed(codes: Array, bits: int) -> Array:
    """[..., n] codes below 2**bits, n a multiple of the period, as [..., n · bits / 32] uint32."""
    codes = codes.astype(jnp.uint32).reshape(*codes.shape[:-1], codes.shape[-1] // period(bits), period(bits))
    along = lambda a: jnp.expand_dims(jnp.asarray(a), tuple(range(codes.ndim - 1)))
    word, shift, goes_on = _places(bits)
    words = []
    for i in range(period(bits) * bits // 32):
        begins, ends = word == i, goes_on & (word + 1 == i)
        low = jnp.where(along(begins), codes << along(np.where(begins, shift, 0).astype(np.uint32)), 0)
        high = jnp.where(along(ends), codes >> along(np.where(ends, 32 - shift, 0).astype(np.uint32)), 0)
        words.append((low | high).sum(-1, dtype=jnp.uint32))
    words = jnp.stack(words, -1)
    return words.reshape(*words.shape[:-2], words.shape[-2] * words.shape[-1])


def unpacked(words: Array, bits: int) -> Array:
    """[..., n · bits / 32] uint32 as [..., n] codes, uint32."""
    per_period = period(bits) * bits // 32
    words = words.reshape(*words.shape[:-1], words.shape[-1] // per_period, per_period)
    along = lambda a: jnp.expand_dims(jnp.asarray(a), tuple(range(words.ndim - 1)))
    word, shift, goes_on = _places(bits)
    if per_period == 1:
        # XLA moves a constant or a product out of a loop, but no slice of an iota. Where the shifts are known, code for
        # a CPU is vectorised, and dequantises blocks of a matrix up to six times as fast.
        codes = words >> along(lax.slice(lax.iota(np.uint32, 32), (0,), (32,), (bits,)))
    else:
        high = words[..., np.where(goes_on, word + 1, word)] << along(
            np.where(goes_on, 32 - shift, 0).astype(np.uint32)
        )
        codes = words[..., word] >> along(shift) | jnp.where(along(goes_on), high, 0)
    codes = codes & np.uint32(2**bits - 1)
    return codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
