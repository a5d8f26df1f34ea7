"""Attention over pages that TurboQuant has quantised: what its two operations have in common in plain JAX.

⟨q, k̃⟩ is taken as QJL defines it, ‖k‖ · (⟨Π·q, c⟩ + √(π/2e) · ‖r‖ · ⟨S·Π·q, s⟩): a query is rotated and projected once,
and o is made of rotated values and rotated back once. So pages are dequantised feature by feature, without a product.
"""

from typing import Any

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.xla_utils.turboquant import (
    Matrices,
    Quantised,
    product,
    rotated_keys,
    rotated_queries,
    rotated_values,
)

from .._places import Places
from ._pages import Fetch, Queries, attend, causal_queries, formula, of_pages


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
    """o and lse, with the logits of every token and every slot of its sequence."""
    queries, fetch, size = _rotated(x, pools, at, spec)
    return _rotated_back(x, *formula(queries, fetch, x.block_tables.shape[1] * size, spec))


def attention(
    x: Any, pools: Quantised, at: Places, spec: CacheSpec, config: RaggedPageAttentionConfig
) -> tuple[Array, Array]:
    """o and lse, some tokens and some pages at a time."""
    queries, fetch, size = _rotated(x, pools, at, spec)
    return _rotated_back(x, *attend(queries, fetch, config.pages_per_block * size, config.queries_per_block, spec))


def _rotated(x: Any, pools: Quantised, at: Places, spec: CacheSpec) -> tuple[Queries, Fetch, int]:
    """The queries, what fetches the keys and values that they meet, and the slots of a page."""
    by, size = matrices_of(x), pools.value_norms.shape[1]

    def read(page: Array) -> tuple[Array, Array]:
        found = Quantised(*(pool[page] for pool in pools))
        return rotated_keys(found, by), rotated_values(found, by)

    fetch = of_pages(x.block_tables, *pools.value_norms.shape[:2], read)
    return causal_queries(x, rotated_queries(x.q, by), at, size, spec), fetch, size


def _rotated_back(x: Any, o: Array, lse: Array) -> tuple[Array, Array]:
    return product(o, x.rotation_matrix).astype(x.q.dtype), lse
