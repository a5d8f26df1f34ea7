"""multi_latent_page_attention in plain JAX: the formula, and its decomposition into blocks of tokens and of pages.

A slot holds the latent of a position and its rotary part. Both together are the key of every head, and the latent is
the value: attention with one key/value head, whose values are the first features of its keys. With lists of keys, only
the listed keys of a block of tokens are gathered.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig
from ejkernel.xla_utils.symbolic import is_symbolic

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from ._key_lists import in_lists, listed_slots
from ._pages import Fetch, Queries, attend, dequantised, formula, of_pages, over_batch, ragged_queries


def reference(*operands: Any, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""

    def step(x: Operands) -> Outputs:
        return Outputs(*formula(*_prepared(x, spec), spec))

    return over_batch(step, Operands(*operands))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> MultiLatentPageAttentionConfig:
    """16 tokens and some 256 keys of each at a time: what is gathered for them fits the cache of a CPU."""
    return MultiLatentPageAttentionConfig(16, pages_per_block=max(1, 256 // operands.pages.shape[2]))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the decomposition cannot run, or None: a symbolic number of tokens cannot be cut into equal blocks."""
    if spec.batch_invariant and is_symbolic(operands.q_latent):
        return "batch_invariant needs a static number of tokens"
    return None


@kernel_registry.register("multi_latent_page_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def multi_latent_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: MultiLatentPageAttentionConfig = MultiLatentPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of multi_latent_page_attention, in XLA."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands), spec.batch_invariant)


def _step(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Outputs:
    keys = config.pages_per_block * x.pages.shape[1]
    queries, fetch, _ = _prepared(x, spec)
    return Outputs(*attend(queries, fetch, keys, config.queries_per_block, spec))


def _prepared(x: Operands, spec: CacheSpec) -> tuple[Queries, Fetch, int]:
    """The queries, a function that fetches their keys, and the number of positions of a sequence, or of a list."""
    q, size = jnp.concatenate([x.q_latent, x.q_rope], axis=-1), x.pages.shape[1]
    queries = ragged_queries(x, q, size, spec)
    keys_and_values = lambda keys: (keys, keys[..., : x.q_latent.shape[-1]])
    if x.indices is None or 0 in x.indices.shape:  # lists of no tokens
        read = lambda page: dequantised(x.pages[page][:, :, :, None], x.k_scale, page, q.dtype)
        fetch = of_pages(x.block_tables, *x.pages.shape[:2], lambda page: keys_and_values(read(page)))
        return queries, fetch, x.block_tables.shape[1] * size
    slots = listed_slots(queries, x.indices, x.block_tables, *x.pages.shape[:2])
    pool, scale = x.pages.reshape(-1, x.pages.shape[2]), None if x.k_scale is None else x.k_scale.reshape(-1, 1, 1)
    read = lambda slot: dequantised(pool[slot][:, :, None, None], scale, slot, q.dtype)
    fetch = of_pages(slots, pool.shape[0], 1, lambda slot: keys_and_values(read(slot)))
    return in_lists(queries, slots), fetch, slots.shape[1]
