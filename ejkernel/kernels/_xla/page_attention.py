"""page_attention in plain JAX: the formula, and its decomposition into blocks of sequences and of pages.

The query of sequence n is at position context_lens[n] − 1, and key j of the sequence is in slot `j % page_size` of page
`block_tables[n, j // page_size]`. A plan would divide this work among programs; here there is only one.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.page_attention import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.page_attention import PageAttentionConfig
from ejkernel.xla_utils.symbolic import is_symbolic

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from ._pages import Fetch, Queries, attend, dequantised, formula, of_pages, over_batch, seen_until, sinks_of


def reference(*operands: Any, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every slot of a sequence."""

    def step(x: Operands) -> Outputs:
        length = x.block_tables.shape[1] * x.k_pages.shape[1]
        return Outputs(*formula(_queries(x, spec), _fetch(x), length, spec))

    return over_batch(step, Operands(*operands))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> PageAttentionConfig:
    """16 sequences and some 256 keys of each at a time: what is gathered for them fits the cache of a CPU."""
    return PageAttentionConfig(keys_per_block=256, queries_per_block=16)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[PageAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the decomposition cannot run, or None: a symbolic number of sequences cannot be cut into equal blocks."""
    if spec.batch_invariant and is_symbolic(operands.q):
        return "batch_invariant needs a static number of sequences"
    return None


@kernel_registry.register("page_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: PageAttentionConfig = PageAttentionConfig(),
) -> Outputs:
    """The results o and lse of page_attention, in XLA."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands), spec.batch_invariant)


def _step(x: Operands, spec: CacheSpec, config: PageAttentionConfig) -> Outputs:
    page = x.k_pages.shape[1]
    keys = page * max(1, config.keys_per_block // page)
    spec = replace(spec, num_splits=spec.num_splits or config.num_splits)
    return Outputs(*attend(_queries(x, spec), _fetch(x), keys, config.queries_per_block, spec))


def _queries(x: Operands, spec: CacheSpec) -> Queries:
    """The query of each sequence, which sees the part of the context that its block table holds."""
    first, stop = seen_until(x.context_lens - 1, x.context_lens, spec)
    stop = jnp.minimum(stop, x.block_tables.shape[1] * x.k_pages.shape[1])
    return Queries(
        x.q,
        jnp.arange(x.q.shape[0], dtype=jnp.int32),
        first,
        stop,
        x.context_lens > 0,
        sinks=sinks_of(x.sinks, x.q.shape[0]),
    )


def _fetch(x: Operands) -> Fetch:
    pages, size = x.k_pages.shape[:2]
    scales = (x.k_pages, x.k_scale), (x.v_pages, x.v_scale)
    read = lambda page: tuple(dequantised(a[page], scale, page, x.q.dtype) for a, scale in scales)
    return of_pages(x.block_tables, pages, size, read)
