"""Blocks of tokens that are counted within each sequence: positions of tokens, and the tokens of blocks.

Sequences are packed by `cu_seqlens` [n + 1]; without `cu_seqlens` there is one sequence.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .search import entries_until


class Places(NamedTuple):
    """The place of each query in its sequence, [queries] int32 each.

    first: the first token of its sequence.
    stop: the number of tokens of its sequence that it sees, of which its own is the last; 0 if it sees none.
    sequence: the number of its sequence; the number of all sequences if it is in none.
    """

    first: Array
    stop: Array
    sequence: Array


def places(cu_seqlens: Array | None, queries: int, keys: int) -> Places:
    """The places of the queries of a call; the last query is the last key, and packed queries are all tokens."""
    token = jnp.arange(queries, dtype=jnp.int32)
    if cu_seqlens is None:
        zero = jnp.zeros_like(token)
        return Places(zero, jnp.maximum(token + (keys - queries + 1), 0), zero)
    cuts = jnp.clip(cu_seqlens, 0, keys)
    sequences = cuts.shape[0] - 1
    owner = entries_until(cuts, token) - 1
    inside = (owner >= 0) & (owner < sequences)
    first = cuts[jnp.clip(owner, 0, sequences - 1)]
    return Places(first, jnp.where(inside, token - first + 1, 0), jnp.where(inside, owner, sequences))


def mean_keys(k: Array, cu_seqlens: Array | None, size: int) -> Array:
    """The mean keys [blocks, g, d] of complete blocks, in the dtype of statistics."""
    (t, g, d), dtype = k.shape, np.promote_types(k.dtype, np.float32)
    if cu_seqlens is None:
        blocks = t // size
        return k[: blocks * size].reshape(blocks, size, g, d).mean(1, dtype=dtype)
    rows = ended_blocks(cu_seqlens, t, size).tokens
    return k.at[rows].get(mode="fill", fill_value=0).mean(1, dtype=dtype)


class Rows(NamedTuple):
    """Rows of `size` tokens, those of one sequence after those of another.

    before: [sequences + 1] int32: the number of rows of all sequences before each.
    tokens: [rows, size] int32: the token at each place of a row. Empty places have numbers past the last token, and all
        numbers are different.
    """

    before: Array
    tokens: Array


def ended_blocks(cu_seqlens: Array, tokens: int, size: int) -> Rows:
    """The complete blocks of `size` tokens in each sequence."""
    cuts = jnp.clip(cu_seqlens, 0, tokens)
    return _rows(cuts, (cuts[1:] - cuts[:-1]) // size, tokens // size, 0, tokens, size)


def rows_by_ended_blocks(cu_seqlens: Array, tokens: int, size: int) -> Rows:
    """The tokens of each sequence in rows; row m has the tokens for which exactly m blocks have ended.

    Position i is in row (i + 1) // size at place (i + 1) mod size.
    """
    cuts = jnp.clip(cu_seqlens, 0, tokens)
    rows = tokens // size + cuts.shape[0] - 1
    return _rows(cuts, (cuts[1:] - cuts[:-1]) // size + 1, rows, -1, tokens, size)


def _rows(cuts: Array, needed: Array, count: int, shift: int, tokens: int, size: int) -> Rows:
    """`count` rows, `needed` of them for each sequence; its first row begins `shift` tokens after its cut."""
    after = jnp.cumsum(needed, dtype=jnp.int32)
    before = jnp.pad(after, (1, 0))
    row = jnp.arange(count, dtype=jnp.int32)
    owner = entries_until(after, row)
    of = jnp.minimum(owner, needed.shape[0] - 1)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    token = (cuts[of] + (row - before[of]) * size + shift)[:, None] + place
    inside = (owner < needed.shape[0])[:, None] & (token >= cuts[of][:, None]) & (token < cuts[of + 1][:, None])
    return Rows(before, jnp.where(inside, token, tokens + row[:, None] * size + place))
