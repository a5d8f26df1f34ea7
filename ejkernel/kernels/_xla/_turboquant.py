"""Attention over pages quantised by TurboQuant in plain JAX: the common parts of its two operations.

⟨q, k̃⟩ is computed as QJL defines it, ‖k‖ · (⟨Π·q, c⟩ + √(π/2e) · ‖r‖ · ⟨S·Π·q, s⟩): a query is rotated and projected
once, and o is a sum of rotated values that is rotated back once. So pages are dequantised elementwise, with no product.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.xla_utils.turboquant import (
    Matrices,
    Quantised,
    product,
    quantise,
    rotated_keys,
    rotated_queries,
    rotated_values,
)

from .._places import Places, places, slots
from ._pages import Fetch, Queries, attend, attend_one_sequence, causal_queries, formula, of_pages
from ._sequence_chunks import chunks_of


def heuristic(spec: CacheSpec, operands: Any, target: Target) -> RaggedPageAttentionConfig:
    """16 tokens and some 256 keys of each at a time: what is gathered for them fits the cache of a CPU."""
    return RaggedPageAttentionConfig(16, pages_per_block=max(1, 256 // operands.key_indices_pages.shape[2]))


def space(spec: CacheSpec, operands: Any, target: Target) -> list[RaggedPageAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def matrices_of(x: Any) -> Matrices:
    """The matrices among the operands of one batch index."""
    return Matrices(*(getattr(x, name) for name in Matrices._fields))


def pools_of(x: Any) -> Quantised:
    """The pools among the operands of one batch index."""
    return Quantised(*(getattr(x, f"{name}_pages") for name in Quantised._fields))


def written(x: Any) -> tuple[Places, Quantised]:
    """The places of a step's tokens, and the pools with their keys and values; all other bytes are unchanged."""
    at = places(x.q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs)
    pools, new = pools_of(x), quantise(x.k, x.v, matrices_of(x))
    # Behind a barrier they are computed once for all layers, and not again in the scatters of each.
    slot = lax.optimization_barrier(slots(at, x.block_tables, *x.value_norms_pages.shape[:2]))
    write = lambda pool, rows: pool.at[slot].set(rows.astype(pool.dtype), mode="drop")
    return at, Quantised(*map(write, pools, new))


def attention_by_formula(x: Any, pools: Quantised, at: Places, spec: CacheSpec) -> tuple[Array, Array]:
    """o and lse, with the logits of every token and every slot of its sequence."""
    queries, fetch, size = _rotated(x, pools, at, spec)
    return _rotated_back(x, *formula(queries, fetch, x.block_tables.shape[1] * size, spec))


def attention(
    x: Any, pools: Quantised, at: Places, spec: CacheSpec, config: RaggedPageAttentionConfig
) -> tuple[Array, Array]:
    """o and lse, some tokens and some pages at a time.

    Several sequences of one token share a block of queries, each with its own keys. A block with tokens of a longer
    sequence has no others, so that its keys are dequantised once.
    """
    queries, fetch, size = _rotated(x, pools, at, spec)
    keys, tokens = config.pages_per_block * size, queries.q.shape[0]
    of_each = lambda x: attend(x, fetch, keys, config.queries_per_block, spec)
    if is_symbolic_dim(tokens) or tokens <= x.context_lens.shape[0]:
        return _rotated_back(x, *of_each(queries))
    spans = _spans(x, tokens)
    is_one = spans[:, 1] - spans[:, 0] == 1
    of_ones = jnp.where(is_one, spans[:, 0], tokens)
    found = of_each(_taken(queries, of_ones))
    of_tokens = lambda a: jnp.zeros((tokens, *a.shape[1:]), a.dtype)
    put = lambda whole, at, part: whole.at[at].set(part, mode="drop")
    nothing = of_tokens(found[0]), of_tokens(found[1]) - np.array(np.inf, found[1].dtype)
    found = tuple(put(whole, of_ones, part) for whole, part in zip(nothing, found, strict=True))
    block = min(4 * config.queries_per_block, tokens)
    spans = jnp.where(is_one[:, None], 0, spans)
    chunks = chunks_of(spans[None], tokens, block)
    token = chunks.token[0].reshape(-1, block)

    def step(n, found):
        parts = attend_one_sequence(_taken(queries, token[n]), fetch, keys, spec)
        return tuple(put(whole, token[n], part) for whole, part in zip(found, parts, strict=True))

    return _rotated_back(x, *lax.fori_loop(np.int32(0), chunks.last.max() + 1, step, found))


def _spans(x: Any, tokens: int) -> Array:
    """The first token of each sequence and the one after its last, [n,2]."""
    n = x.context_lens.shape[0]
    cuts = x.query_start_loc[jnp.minimum(jnp.arange(n + 1), jnp.clip(x.num_seqs[0], 0, n))].clip(0, tokens)
    return jnp.stack([cuts[:-1], jnp.maximum(cuts[1:], cuts[:-1])], -1)


def _taken(queries: Queries, token: Array) -> Queries:
    """The queries of some tokens; indices past the last give invalid ones, whose results are 0 and −∞."""
    return jax.tree.map(lambda a: a.at[token].get(mode="fill", fill_value=0), queries)


def _rotated(x: Any, pools: Quantised, at: Places, spec: CacheSpec) -> tuple[Queries, Fetch, int]:
    """The rotated queries, a function that fetches rotated keys and values, and the slots of a page."""
    by, size = matrices_of(x), pools.value_norms.shape[1]

    def read(page: Array) -> tuple[Array, Array]:
        found = Quantised(*(pool[page] for pool in pools))
        return rotated_keys(found, by), rotated_values(found, by)

    fetch = of_pages(x.block_tables, *pools.value_norms.shape[:2], read)
    return causal_queries(x, rotated_queries(x.q, by), at, size, spec), fetch, size


def _rotated_back(x: Any, o: Array, lse: Array) -> tuple[Array, Array]:
    return product(o, x.rotation_matrix).astype(x.q.dtype), lse
