"""multi_latent_page_attention in plain JAX: the formula, and its decomposition into blocks of tokens and of pages.

A slot holds the latent of a position and its rotary part. Both together are the key of every head, and the latent is
the value: attention of one key/value head, whose values are the first features of its keys.
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
from ._pages import Fetch, Queries, attend, dequantised, formula, of_pages, over_batch, ragged_queries


def reference(*operands: Any, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every token and every slot of its sequence."""

    def step(x: Operands) -> Outputs:
        length = x.block_tables.shape[1] * x.pages.shape[1]
        return Outputs(*formula(_queries(x, spec), _fetch(x), length, spec))

    return over_batch(step, Operands(*operands))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> MultiLatentPageAttentionConfig:
    """16 tokens beside some 256 keys of each: what is gathered for them fits the cache of a CPU."""
    return MultiLatentPageAttentionConfig(16, pages_per_block=max(1, 256 // operands.pages.shape[2]))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """That of the heuristic."""
    return [heuristic(spec, operands, target)]


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Everything, but a number of tokens that is not known cannot be cut into blocks of one size."""
    if spec.batch_invariant and is_symbolic(operands.q_latent):
        return "batch_invariant needs a number of tokens that is known"
    return None


@kernel_registry.register("multi_latent_page_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def multi_latent_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: MultiLatentPageAttentionConfig = MultiLatentPageAttentionConfig(),
) -> Outputs:
    """o and lse."""
    return over_batch(partial(_step, spec=spec, config=config), Operands(*operands), spec.batch_invariant)


def _step(x: Operands, spec: CacheSpec, config: MultiLatentPageAttentionConfig) -> Outputs:
    keys = config.pages_per_block * x.pages.shape[1]
    return Outputs(*attend(_queries(x, spec), _fetch(x), keys, config.queries_per_block, spec))


def _queries(x: Operands, spec: CacheSpec) -> Queries:
    q = jnp.concatenate([x.q_latent, x.q_rope], axis=-1)
    return ragged_queries(x, q, x.pages.shape[1], spec)


def _fetch(x: Operands) -> Fetch:
    def read(page: Array) -> tuple[Array, Array]:
        keys = dequantised(x.pages[page][:, :, :, None], x.k_scale, page, x.q_latent.dtype)
        return keys, keys[..., : x.q_latent.shape[-1]]

    return of_pages(x.block_tables, *x.pages.shape[:2], read)
