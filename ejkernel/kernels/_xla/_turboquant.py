"""Attention over pages that TurboQuant has quantised: what its two operations have in common in plain JAX.

⟨q, k̃⟩ is that of the rotated and projected query, made once, with what the bytes of a key stand for; and o is made of
rotated values, so that it is rotated back once. Pages are so dequantised feature by feature, without a product.
"""

from typing import Any

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.xla_utils.turboquant import (
    Matrices,
    Quantised,
    dequantised_keys,
    dequantised_values,
    product,
    rotated_keys,
    rotated_queries,
    rotated_values,
)

from .._places import Places
from ._pages import Fetch, attend, causal_queries, formula, of_pages


def heuristic(spec: CacheSpec, operands: Any, target: Target) -> RaggedPageAttentionConfig:
    """16 tokens beside some 256 keys of each: what is gathered for them fits the cache of a CPU."""
    return RaggedPageAttentionConfig(16, pages_per_block=max(1, 256 // operands.key_indices_pages.shape[2]))


def space(spec: CacheSpec, operands: Any, target: Target) -> list[RaggedPageAttentionConfig]:
    """That of the heuristic."""
    return [heuristic(spec, operands, target)]


def matrices_of(x: Any) -> Matrices:
    """The matrices among the operands of one batch index."""
    return Matrices(*(getattr(x, name) for name in Matrices._fields))


def pools_of(x: Any) -> Quantised:
    """The pools among them."""
    return Quantised(*(getattr(x, f"{name}_pages") for name in Quantised._fields))


def attention_by_formula(x: Any, pools: Quantised, at: Places, spec: CacheSpec) -> tuple[Array, Array]:
    """o and lse from keys and values that are dequantised first."""
    by, size = matrices_of(x), pools.value_norms.shape[1]
    queries = causal_queries(x, x.q, at, size, spec)
    fetch = _fetch(x, pools, lambda page: (dequantised_keys(page, by), dequantised_values(page, by)))
    return formula(queries, fetch, x.block_tables.shape[1] * size, spec)


def attention(
    x: Any, pools: Quantised, at: Places, spec: CacheSpec, config: RaggedPageAttentionConfig
) -> tuple[Array, Array]:
    """o and lse."""
    by, size = matrices_of(x), pools.value_norms.shape[1]
    queries = causal_queries(x, rotated_queries(x.q, by), at, size, spec)
    fetch = _fetch(x, pools, lambda page: (rotated_keys(page, by), rotated_values(page, by)))
    o, lse = attend(queries, fetch, config.pages_per_block * size, config.queries_per_block, spec)
    return product(o, by.rotation_matrix).astype(x.q.dtype), lse


def _fetch(x: Any, pools: Quantised, dequantised: Any) -> Fetch:
    read = lambda page: dequantised(Quantised(*(pool[page] for pool in pools)))
    return of_pages(x.block_tables, *pools.value_norms.shape[:2], read)
