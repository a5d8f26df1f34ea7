"""ragged_decode_attention in plain JAX: the formula, and its decomposition into blocks of sequences and of keys.

The query of sequence n is at position sequence_end[n] − 1, and sees the keys from sequence_start[n] up to its own.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_decode_attention import Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.ragged_decode_attention import RaggedDecodeAttentionConfig

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._pages import Fetch, Queries, attend, formula, seen_until, sinks_of


def reference(*operands: Any, spec: CacheSpec = CacheSpec()) -> Outputs:
    """The formula, with the logits of every key of the cache."""
    x = Operands(*operands)
    return Outputs(*formula(_queries(x, spec), _fetch(x), x.k.shape[1], spec))


def heuristic(spec: CacheSpec, operands: Operands, target: Target) -> RaggedDecodeAttentionConfig:
    """16 sequences and 256 keys of each at a time: what is gathered for them fits the cache of a CPU."""
    return RaggedDecodeAttentionConfig(16, 256)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedDecodeAttentionConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


@kernel_registry.register("ragged_decode_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def ragged_decode_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedDecodeAttentionConfig = RaggedDecodeAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_decode_attention, in XLA."""
    x = Operands(*operands)
    blocks = config.keys_per_block, config.queries_per_block
    return Outputs(*attend(_queries(x, spec), _fetch(x), *blocks, spec))


def _queries(x: Operands, spec: CacheSpec) -> Queries:
    """The query of each sequence."""
    end = jnp.clip(x.sequence_end, 0, x.k.shape[1])
    first, stop = seen_until(end - 1, end, spec)
    first = jnp.maximum(first, x.sequence_start)
    sequence = jnp.arange(x.q.shape[0], dtype=jnp.int32)
    return Queries(x.q, sequence, first, stop, jnp.ones_like(sequence, bool), sinks=sinks_of(x.sinks, x.q.shape[0]))


def _fetch(x: Operands) -> Fetch:
    def fetch(sequence: Array, position: Array) -> tuple[Array, Array]:
        at = sequence[:, None], jnp.clip(position, 0, x.k.shape[1] - 1)
        return x.k[at], x.v[at]

    return fetch
