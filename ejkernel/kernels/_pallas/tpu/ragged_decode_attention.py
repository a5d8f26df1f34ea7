"""ragged_decode_attention on TPU: a work item for each sequence, whose keys are contiguous."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_decode_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_decode_attention import RaggedDecodeAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from ..._visibility import interval
from . import _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    x = operands
    if reason := _paged.refusal(spec, target, x.q, _caches(x), x.k.shape[1]):
        return reason.replace("pages of", "a cache of")
    if not space(spec, x, target):
        return _paged.VECTOR_MEMORY
    return _paged.table_refusal(x.q.shape[0], 0)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedDecodeAttentionConfig]:
    """The configs worth measuring, the most promising first; none of them depends on the batch."""
    x, length = operands, operands.k.shape[1]
    rows = _paged.rows_of_tile(1, x.q.shape[1] // x.k.shape[2])
    sizes = _paged.keys_of_blocks(x.q, _caches(x), rows, _paged.piece_of(length), length)
    return [RaggedDecodeAttentionConfig(1, keys, platform=Platform.PALLAS, backend=Backend.TPU) for keys in sizes]


@kernel_registry.register("ragged_decode_attention", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_decode_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedDecodeAttentionConfig = RaggedDecodeAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_decode_attention, by the Pallas kernels for TPUs."""
    from ._paged.decode import decode

    x = Operands(*operands)
    end = jnp.clip(x.sequence_end, 0, x.k.shape[1])
    first, stop = interval(end - 1, spec.left, None, jnp.maximum(x.sequence_start, 0), end)
    batch = jnp.arange(x.q.shape[0], dtype=jnp.int32)
    return Outputs(
        *decode(x.q, x.k, x.v, first, stop, batch, None, x.sinks,
                spec=spec, keys=config.keys_per_block, name="ragged_decode_attention")
    )  # fmt: skip


def _caches(x: Operands) -> list[tuple]:
    """The caches of keys and of values, each with its number of heads."""
    return [(cache, cache.shape[2]) for cache in (x.k, x.v)]
