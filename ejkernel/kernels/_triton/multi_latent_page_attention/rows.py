"""The rows of a step: of which tokens each is, and which keys these see, by contexts, drafts, or lists of keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.kernels._page_plan import ragged_rows
from ejkernel.kernels._triton._paged.drafts import in_words
from ejkernel.kernels._xla._key_lists import ends_of_lists, listed_slots
from ejkernel.kernels._xla._pages import Queries, ragged_queries
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands


class Step(NamedTuple):
    """Who sees whom in the steps of a batch.

    Attributes:
        rows: [b,r,3] int32, of each row its sequence, its first token, and how many tokens it has, which may be 0.
        first, stop: [b,t] int32, the keys first ≤ j < stop that a token sees, drafts aside.
        valid: [b,t] bool, whether it is of any sequence.
        cached: [b,t] int32, the position from which on drafts decide; None without.
        drafts, drafts_of_row: [b,t,w] and [b,r,w] int32, bits of the drafts that a token, or one of a row, sees.
    """

    rows: Array
    first: Array
    stop: Array
    valid: Array
    cached: Array | None
    drafts: Array | None
    drafts_of_row: Array | None


def step_of(x: Operands, spec: CacheSpec, tokens: int, is_of_drafts: bool = False) -> Step:
    """With rows of up to so many tokens, which see all of their keys or the drafts of these alone."""
    T, page, n = x.q_latent.shape[1], x.pages.shape[2], x.context_lens.shape[1]
    drafts = None if x.draft_mask is None else x.draft_mask.shape[2]

    def of_batch(context_lens, block_tables, query_start_loc, num_seqs, draft_mask):
        tables = context_lens, block_tables, query_start_loc, num_seqs
        queries = _visible(T, page, tables, draft_mask, spec)
        if is_of_drafts:
            queries = queries._replace(first=jnp.maximum(queries.first, queries.cached))
        count = jnp.clip(num_seqs[0], 0, n)
        rows = ragged_rows(context_lens, query_start_loc, count, T, page, spec.left, tokens, drafts)
        # No more rows than tokens have any, and those come first.
        rows = jnp.stack([rows.request, rows.token, rows.tokens], axis=1)[:T]
        of_tokens, of_rows = None, None
        if draft_mask is not None:
            # Of its row a token only asks for drafts that are within its context and window.
            draft = queries.cached[:, None] + jnp.arange(drafts, dtype=jnp.int32)
            visible = draft_mask & (draft >= queries.first[:, None]) & (draft < queries.stop[:, None])
            of_tokens, number = in_words(visible), jnp.arange(tokens, dtype=jnp.int32)
            places = jnp.where(number < rows[:, 2:], rows[:, 1:2] + number, T)
            words = of_tokens.at[places].get(mode="fill", fill_value=0)
            of_rows = lax.reduce(words, np.int32(0), lax.bitwise_or, (1,))
        return Step(rows, queries.first, queries.stop, queries.valid, queries.cached, of_tokens, of_rows)

    return jax.vmap(of_batch)(x.context_lens, x.block_tables, x.query_start_loc, x.num_seqs, x.draft_mask)


def step_of_lists(x: Operands, spec: CacheSpec) -> tuple[Step, Operands]:
    """Rows of one token, and operands with pages of one slot and, for tables, the lists of slots of all tokens."""
    T, (pages, page) = x.q_latent.shape[1], x.pages.shape[1:3]

    def of_batch(context_lens, block_tables, query_start_loc, num_seqs, draft_mask, indices):
        queries = _visible(T, page, (context_lens, block_tables, query_start_loc, num_seqs), draft_mask, spec)
        slots = listed_slots(queries, indices, block_tables, pages, page)
        token = jnp.arange(T, dtype=jnp.int32)
        rows = jnp.stack([token, token, queries.valid.astype(jnp.int32)], axis=1)
        first, stop = jnp.zeros_like(queries.first), ends_of_lists(slots)
        return Step(rows, first, stop, queries.valid, None, None, None), slots

    tables = x.context_lens, x.block_tables, x.query_start_loc, x.num_seqs
    step, slots = jax.vmap(of_batch)(*tables, x.draft_mask, x.indices)
    one_by_one = lambda a: None if a is None else a.reshape(a.shape[0], -1, 1, a.shape[3])
    return step, x._replace(pages=one_by_one(x.pages), k_scale=one_by_one(x.k_scale), block_tables=slots)


def _visible(T: int, page: int, tables: tuple[Array, ...], draft_mask: Array | None, spec: CacheSpec) -> Queries:
    """Of each token the keys that it sees, without its numbers."""
    alone = Operands(None, None, None, *tables, draft_mask=draft_mask)
    return ragged_queries(alone, jnp.zeros((T, 0)), page, spec)
