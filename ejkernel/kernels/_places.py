"""The sequences and positions of the tokens of a serving step, and where their keys and values are in the pages."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Places(NamedTuple):
    """Where each token of a step belongs: its sequence, of which the step has `length` tokens, its position there, and
    whether it is of any sequence."""

    sequence: Array
    length: Array
    position: Array
    valid: Array


def places(tokens: int, context_lens: Array, query_start_loc: Array, num_seqs: Array) -> Places:
    """The places of the tokens; entries of query_start_loc past the last sequence may hold anything."""
    n = context_lens.shape[0]
    count = jnp.clip(num_seqs[0], 0, n)
    starts = jnp.where(jnp.arange(n + 1, dtype=jnp.int32) <= count, query_start_loc, query_start_loc[count])
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(starts[1:], token, side="right", method="compare_all").astype(jnp.int32)
    valid = (token >= starts[0]) & (token < starts[-1])
    sequence = jnp.where(valid, sequence, 0)
    position = context_lens[sequence] - starts[sequence + 1] + token
    return Places(sequence, starts[sequence + 1] - starts[sequence], position, valid & (position >= 0))


def slots(at: Places, block_tables: Array, pages: int, size: int) -> tuple[Array, Array]:
    """The page and the slot for the key and value of each token, in a pool of `pages` pages of `size` slots.

    A token whose page is not in the pool or in the table gets a page past the end, and is not written.
    """
    column = at.position // size
    in_table = at.valid & (column < block_tables.shape[1])
    page = block_tables[at.sequence, jnp.where(in_table, column, 0)]
    return jnp.where(in_table & (page >= 0) & (page < pages), page, pages), at.position % size


def written(x: Any, at: Places) -> Array:
    """The pages of the operands of ragged_page_attention_v3 with the keys and values of the tokens at these places.

    Every other byte is as it was.
    """
    new = jnp.stack([x.k, x.v], axis=2).astype(x.kv_pages.dtype)
    # Behind a barrier they are computed once for all layers, and not again in the scatter of each.
    into = lax.optimization_barrier(slots(at, x.block_tables, *x.kv_pages.shape[:2]))
    return x.kv_pages.at[into].set(new, mode="drop")
