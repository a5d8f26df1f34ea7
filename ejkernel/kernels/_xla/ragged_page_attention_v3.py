"""ragged_page_attention_v3 in plain JAX: the formula, and its decomposition into blocks of tokens and of pages.

Token i of sequence n is at position p = context_lens[n] − q_len[n] + i. Its key and value are written to slot
`p % page_size` of page `block_tables[n, p // page_size]`; then it attends over the positions up to its own.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3 import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._places import places, written
from .._registry import Backend, Platform, configured_by, kernel_registry
from ._pages import Fetch, attend, causal_queries, formula, of_pages, over_batch


def reference(*operands, spec=CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""

    def step(x: Operands) -> Outputs:
        at = places(x.q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs)
        pages = written(x, at)
        queries, length = causal_queries(x, x.q, at, pages.shape[1], spec), x.block_tables.shape[1] * pages.shape[1]
        return Outputs(*formula(queries, _fetch(x, pages), length, spec), pages)

    return over_batch(step, Operands(*operands))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> RaggedPageAttentionConfig:
    """64 tokens and some 256 keys at a time: what is gathered for them fits the cache of a CPU."""
    return RaggedPageAttentionConfig(64, pages_per_block=max(1, 256 // operands.kv_pages.shape[2]))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


@kernel_registry.register("ragged_page_attention_v3", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def ragged_page_attention_v3(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pages with the step's keys and values."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands))


def _step(x: Operands, spec: CacheSpec, config: RaggedPageAttentionConfig) -> Outputs:
    at = places(x.q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs)
    pages = written(x, at)
    keys = config.pages_per_block * pages.shape[1]
    queries, fetch = causal_queries(x, x.q, at, pages.shape[1], spec), _fetch(x, pages)
    return Outputs(*attend(queries, fetch, keys, config.queries_per_block, spec), pages)


def _fetch(x: Operands, pages: Array) -> Fetch:
    read = lambda page: tuple(jnp.moveaxis(pages[page], 4, 0))
    return of_pages(x.block_tables, *pages.shape[:2], read)
