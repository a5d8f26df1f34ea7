"""Which drafts tokens see: bits, of which a tile of keys reads one word for each of its rows."""

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array, lax


def in_words(mask: Array) -> Array:
    """[…,w] bool as words […,⌈w/32⌉] int32, of which bit i of word n is number 32·n + i."""
    bits = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)]).reshape(*mask.shape[:-1], -1, 32)
    words = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


@triton.jit
def is_drafted(words, row, asked, tile, count: tl.constexpr, BLOCK_K: tl.constexpr):
    """Whether each row of words [r,count] has the drafts of a tile, [r, BLOCK_K]; none where it is not asked.

    Tiles are counted from the first draft, and have up to 32 keys, so that each is in one word.
    """
    tiles_of_word: tl.constexpr = 32 // BLOCK_K
    word = tile // tiles_of_word
    bits = tl.load(words + row.to(tl.int64) * count + word, mask=asked & (word < count), other=0)
    place = tile % tiles_of_word * BLOCK_K + tl.arange(0, BLOCK_K)
    return ((bits[:, None] >> place[None, :]) & 1) != 0


@triton.jit
def visible_tiles(words, row, asked, count: tl.constexpr, BLOCK_K: tl.constexpr):
    """How many tiles of drafts there are up to the last word of which some row has a bit."""
    AT_ONCE: tl.constexpr = 16
    stop = 0
    for first in tl.range(0, count, AT_ONCE):
        word = first + tl.arange(0, AT_ONCE)
        at = row.to(tl.int64)[:, None] * count + word[None, :]
        bits = tl.load(words + at, mask=asked[:, None] & (word < count)[None, :], other=0)
        stop = tl.maximum(stop, tl.max(tl.max(tl.where(bits != 0, word[None, :] + 1, 0), 1), 0))
    return stop * (32 // BLOCK_K)
