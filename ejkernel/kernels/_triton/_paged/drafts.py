"""Which drafts tokens see: bits, of which a tile of keys reads one word for each of its rows."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array, lax

# Tokens of a step from which on it is taken to have prefills, whose masks are causal.
LEAST_TOKENS_OF_PREFILLS = 1024


def in_words(mask: Array) -> Array:
    """[…,w] bool as words […,⌈w/32⌉] int32, of which bit i of word n is number 32·n + i."""
    bits = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)]).reshape(*mask.shape[:-1], -1, 32)
    words = (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def causal_drafts(words: Array, query_start_loc: Array, num_seqs: Array) -> Array:
    """[b,n]: of how many drafts of a sequence, from the first on, its tokens see those up to their own and no others.

    Of words [b,t,⌈w/32⌉], query_start_loc [b,n + 1] and num_seqs [b,1]. 0 in steps of few tokens, which have trees.
    """
    if words.shape[1] < LEAST_TOKENS_OF_PREFILLS:
        return jnp.zeros((query_start_loc.shape[0], query_start_loc.shape[1] - 1), jnp.int32)
    tokens, count = jnp.arange(words.shape[1], dtype=jnp.int32), 32 * words.shape[2]
    first_bits = lambda number: _first_bits(number, words.shape[2])

    def of_batch(words, starts, num_seqs):
        is_of = (starts[:-1, None] <= tokens) & (tokens < starts[1:, None])
        is_of &= jnp.arange(len(starts) - 1)[:, None] < num_seqs
        of_token = lambda x: jnp.max(jnp.where(is_of, x[:, None], 0), 0)
        length, place = of_token(jnp.diff(starts)), tokens - of_token(starts[:-1])
        differs = (words ^ first_bits(place + 1)) & first_bits(length)
        trailing_zeros = lax.population_count((differs & -differs) - 1)
        same = jnp.where(differs == 0, count, 32 * jnp.arange(words.shape[1], dtype=jnp.int32) + trailing_zeros)
        return jnp.min(jnp.where(is_of, jnp.min(same, 1), count), 1)

    return jax.vmap(of_batch)(words, query_start_loc, num_seqs)


def _first_bits(number: Array, words: int) -> Array:
    """[t] → [t,words] int32, of whose bits the first `number` are 1."""
    bits = jnp.clip(number[:, None] - 32 * jnp.arange(words, dtype=jnp.int32), 0, 32)
    return jnp.where(bits == 32, -1, (1 << jnp.minimum(bits, 31)) - 1)


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
