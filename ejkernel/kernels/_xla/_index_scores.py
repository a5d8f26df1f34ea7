"""The best keys of each token of a step, by the scores of DeepSeek's lightning indexer:

    I_tj = Σ_h w_th · relu(q_th · k_j)        over the keys j that token t sees, of which the highest are listed

A row is a few tokens of one sequence, whose keys are read once for them. Scores are computed by tiles of keys, and are
in memory only for the tokens of one block of rows.

    t tokens · n sequences · h heads · d features · p pages · s slots of a page · r tokens of a row · b rows of a block
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives._pages import CacheSpec

from .._page_plan import ragged_rows
from ._attention import statistics_dtype
from ._chunks import in_chunks
from ._pages import dequantised, ragged_queries, visible

TOKENS_AT_ONCE, KEYS_AT_ONCE = 32, 1024


class Indexed(NamedTuple):
    """A step of an indexer with its tables: q [t,h,d], weights [t,h], pages [p,s,d], k_scale [p?,s?,1] or None.

    `ragged_queries` needs the field `sinks`; an indexer has none.
    """

    q: Array
    weights: Array
    pages: Array
    k_scale: Array | None
    context_lens: Array
    block_tables: Array
    query_start_loc: Array
    num_seqs: Array
    draft_mask: Array | None = None
    sinks: None = None


def best_keys(x: Indexed, count: int) -> Array:
    """The positions int32 [t,count] of the keys with the highest scores, the highest first, then the earlier.

    They are −1 where a token sees fewer keys, and for tokens of no sequence. Keys that are visible but whose score is
    NaN or −∞ come last. All arrays vary over the same manual axes.
    """
    (tokens, _, _), (_, size, _), (sequences, columns) = x.q.shape, x.pages.shape, x.block_tables.shape
    unknown = is_symbolic_dim(tokens) or is_symbolic_dim(sequences)
    if not unknown and tokens == 0:
        return jnp.full_like(x.q, -1, jnp.int32, (0, count))
    of_row = 1 if unknown else max(1, min(TOKENS_AT_ONCE, tokens // sequences))
    drafts = None if x.draft_mask is None else x.draft_mask.shape[1]
    tables = x.context_lens, x.query_start_loc, jnp.clip(x.num_seqs[0], 0, sequences)
    rows = ragged_rows(*tables, tokens, size, None, of_row, drafts)
    queries = ragged_queries(x, jnp.zeros((tokens, 0)), size, CacheSpec())
    keys = max(1, KEYS_AT_ONCE // size) * size
    tiles = -(-columns * size // keys)
    lowest = np.finfo(statistics_dtype(x.q.dtype)).min
    like_q = partial(jnp.full_like, x.q)  # so that it varies over the same manual axes as the carry of a loop

    def block(found: Array, request: Array, token: Array, length: Array) -> tuple[Array, Any]:
        place = jnp.arange(of_row, dtype=jnp.int32)[None]
        at = jnp.where(place < length[:, None], token[:, None] + place, tokens)  # [b,r]
        safe = jnp.minimum(at, tokens - 1).reshape(-1)
        of_tokens = jax.tree.map(lambda a: a[safe], queries)
        of_tokens = of_tokens._replace(stop=jnp.where(at.reshape(-1) < tokens, of_tokens.stop, 0))
        q, weights = (a[safe].reshape(*at.shape, *a.shape[1:]) for a in (x.q, x.weights))

        def tile(n: Array, scores: Array) -> Array:
            position = n * keys + jnp.arange(keys, dtype=jnp.int32)
            is_visible = visible(of_tokens, jnp.broadcast_to(position, (at.size, keys)))
            score = _scores(q, weights, _keys_of(x, request, position))
            score = jnp.where(score > lowest, score, lowest)  # also for NaN
            return scores.at[n].set(jnp.where(is_visible.reshape(score.shape), score, -jnp.inf))

        nothing = like_q(-np.inf, statistics_dtype(x.q.dtype), (tiles, *at.shape, keys))
        scores = lax.fori_loop(0, -(-of_tokens.stop.max() // keys), tile, nothing)
        scores = jnp.moveaxis(scores, 0, 2).reshape(*at.shape, tiles * keys)
        best, which = lax.top_k(scores, min(count, tiles * keys))
        listed = jnp.where(best > -jnp.inf, which.astype(jnp.int32), -1)
        listed = jnp.pad(listed, ((0, 0), (0, 0), (0, count - listed.shape[2])), constant_values=-1)
        return found.at[at].set(listed, mode="drop"), ()

    nothing = like_q(-1, jnp.int32, (tokens, count))
    return in_chunks(block, nothing, (rows.request, rows.token, rows.tokens), TOKENS_AT_ONCE // of_row)[0]


def _keys_of(x: Indexed, request: Array, position: Array) -> Array:
    """Keys [b,l,d] of the sequences at positions of whole pages."""
    size, (pages, columns) = x.pages.shape[1], (x.pages.shape[0], x.block_tables.shape[1])
    column = jnp.minimum(position[::size] // size, columns - 1)
    page = jnp.clip(x.block_tables[request[:, None], column[None]], 0, pages - 1)
    keys = dequantised(x.pages[page][:, :, :, None], x.k_scale, page, x.q.dtype)
    return keys.reshape(len(request), position.shape[0], -1)


def _scores(q: Array, weights: Array, keys: Array) -> Array:
    """The scores [b,r,l] of q [b,r,h,d], weights [b,r,h] and keys [b,l,d]."""
    dtype = statistics_dtype(q.dtype)
    products = jnp.einsum(
        "brhd,bld->brhl", q.astype(keys.dtype), keys, precision="highest", preferred_element_type=dtype
    )
    return jnp.einsum("brhl,brh->brl", jnp.maximum(products, 0), weights.astype(dtype), precision="highest")
