"""ragged_page_attention in plain JAX: the formula, and its decomposition into blocks of tokens and of pages.

Token i of sequence n is at position context_lens[n] − q_len[n] + i, and key j of the sequence is in slot
`j % page_size` of page `block_tables[n, j // page_size]`. A plan would divide this work among programs; here there is
only one.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.xla_utils.symbolic import is_symbolic

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from ._pages import Fetch, attend, dequantised, formula, of_pages, over_batch, ragged_queries


def reference(*operands: Any, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""

    def step(x: Operands) -> Outputs:
        length = x.block_tables.shape[1] * x.kv_pages.shape[1]
        return Outputs(*formula(ragged_queries(x, x.q, x.kv_pages.shape[1], spec), _fetch(x), length, spec))

    return over_batch(step, Operands(*operands))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> RaggedPageAttentionConfig:
    """16 tokens and some 256 keys of each at a time: what is gathered for them fits the cache of a CPU."""
    return RaggedPageAttentionConfig(16, pages_per_block=max(1, 256 // operands.kv_pages.shape[2]))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the decomposition cannot run, or None: a symbolic number of tokens cannot be cut into equal blocks."""
    if spec.batch_invariant and is_symbolic(operands.q):
        return "batch_invariant needs a static number of tokens"
    return None


@kernel_registry.register("ragged_page_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def ragged_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention, in XLA."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands), spec.batch_invariant)


def _step(x: Operands, spec: CacheSpec, config: RaggedPageAttentionConfig) -> Outputs:
    keys = config.pages_per_block * x.kv_pages.shape[1]
    return Outputs(
        *attend(ragged_queries(x, x.q, x.kv_pages.shape[1], spec), _fetch(x), keys, config.queries_per_block, spec)
    )


def _fetch(x: Operands) -> Fetch:
    def read(page: Array) -> tuple[Array, Array]:
        keys, values = jnp.moveaxis(x.kv_pages[page], 4, 0)
        return tuple(dequantised(a, s, page, x.q.dtype) for a, s in ((keys, x.k_scale), (values, x.v_scale)))

    return of_pages(x.block_tables, *x.kv_pages.shape[:2], read)
