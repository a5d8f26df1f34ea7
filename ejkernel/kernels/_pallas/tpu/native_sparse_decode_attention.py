"""native_sparse_decode_attention on TPU: each branch decodes over a cache of its own.

The selected branch decodes over the blocks of the cache as pages, by a table for each list: a copy has the keys of all
heads, as they are side by side in memory, and all heads are computed, of which the list is for those of one group. The
window decodes over the dense cache, and the compressed branch over the means. XLA would copy the whole cache into
another layout to gather from it.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

from ..._native_sparse import listed_before
from ..._native_sparse_decode import selected_blocks
from ..._registry import kernel_registry, supported_if
from . import _paged

NAME = "native_sparse_decode_attention"


def supports(spec: NativeSparseDecodeAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    x, size = operands, spec.block_size
    if 0 in x.k.shape or x.k.shape[1] % size:
        return f"a cache of {x.k.shape[1]} keys; the kernel takes a multiple of {size}, the size of blocks"
    caches = [(cache, cache.shape[2]) for cache in (x.k, x.v)]
    if reason := _paged.refusal(CacheSpec(), target, x.q, caches, size):
        return reason.replace("pages", "blocks").replace("slots", "keys")
    if not all(_keys(x.q, x.k, x.v, slots, slots) for slots in (size, x.k.shape[1])):
        return _paged.VECTOR_MEMORY
    lists = x.q.shape[0] * x.k.shape[2]
    entries = (x.ranks if x.block_indices is None else x.block_indices).shape[-1]
    return _paged.table_refusal(lists, lists * entries)


@kernel_registry.register(NAME, Platform.PALLAS, Backend.TPU, priority=100)
@supported_if(supports)
def native_sparse_decode_attention(
    *operands: Array | None,
    spec: NativeSparseDecodeAttentionSpec = NativeSparseDecodeAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """o and the blocks of native_sparse_decode_attention, by the Pallas kernels for TPUs."""
    x = Operands(*operands)
    blocks = selected_blocks(x, spec)
    end = jnp.clip(x.sequence_end, 0, x.k.shape[1])
    # The gates of a sequence without keys may be NaN.
    alive = (end > 0)[:, None]
    gated = lambda gate, o: o if gate is None else jnp.where(alive, gate, 0).astype(o.dtype)[..., None] * o
    o = gated(x.g_slc, _selected(x, blocks, end, spec))
    if spec.window is not None:
        o += gated(x.g_swa, _dense(x.q, x.k, x.v, end - spec.window, end, spec))
    if x.g_cmp is not None:
        means = [_eights(a.astype(x.q.dtype)) for a in (x.k_cmp, x.v_cmp)]
        o += gated(x.g_cmp, _dense(x.q, *means, jnp.zeros_like(end), end // spec.block_size, spec))
    return Outputs(o.astype(x.q.dtype), blocks)


def _selected(x: Operands, blocks: Array, end: Array, spec: NativeSparseDecodeAttentionSpec) -> Array:
    """The attention [b,h,e] to the keys of listed blocks, in the dtype of statistics."""
    (B, H, _), (_, T, G, _), size = x.q.shape, x.k.shape, spec.block_size
    table, stop = _table(blocks, end[:, None], size)
    of_blocks = lambda a: a.reshape(B, T // size, size, *a.shape[2:])
    batch = jnp.repeat(jnp.arange(B, dtype=jnp.int32), G)
    o = _decode(
        jnp.repeat(x.q, G, axis=0), of_blocks(x.k), of_blocks(x.v), jnp.zeros_like(stop), stop, batch, table, spec
    )
    by_group = o.reshape(B, G, G, H // G, -1)
    return jnp.moveaxis(jnp.diagonal(by_group, axis1=1, axis2=2), -1, 1).reshape(B, H, -1)


def _table(blocks: Array, end: Array, size: int) -> tuple[Array, Array]:
    """The blocks [b·g,n] in an order in which only the last one may have keys past the end, and the keys of all [b·g].

    Entries that the query does not see, or that are listed before, come after them.
    """
    own = (end - 1) // size
    visible = (blocks >= 0) & (blocks <= own[..., None]) & ~listed_before(blocks)
    is_own = visible & (blocks == own[..., None])
    order = jnp.argsort(jnp.where(visible, is_own.astype(jnp.int32), 2), axis=-1, stable=True)
    table = jnp.take_along_axis(jnp.where(visible, blocks, 0), order, axis=-1)
    stop = visible.sum(-1, dtype=jnp.int32) * size - jnp.where(is_own.any(-1), (own + 1) * size - end, 0)
    return table.reshape(-1, blocks.shape[2]), stop.reshape(-1)


def _dense(q: Array, k: Array, v: Array, first: Array, stop: Array, spec: NativeSparseDecodeAttentionSpec) -> Array:
    """The attention [b,h,e] to the keys first ≤ j < stop of a cache, in the dtype of statistics."""
    batch = jnp.arange(q.shape[0], dtype=jnp.int32)
    return _decode(q, k, v, jnp.maximum(first, 0), jnp.minimum(stop, k.shape[1]), batch, None, spec)


def _decode(q, k, v, first, stop, batch, table, spec: NativeSparseDecodeAttentionSpec) -> Array:
    from ._paged.decode import decode

    slots = k.shape[-3]
    most = slots if table is None else slots * table.shape[1]
    keys = _keys(q, k, v, slots, most)[0]
    cache = CacheSpec(softmax_scale=spec.softmax_scale)
    o, _ = decode(q, k, v, first, stop, batch, table, spec=cache, keys=keys, name=NAME)
    return jnp.where((stop > first)[:, None, None], o, 0).astype(np.promote_types(o.dtype, np.float32))


def _keys(q, k, v, slots: int, most: int) -> list[int]:
    """The keys of a block of the kernel, the most promising first; none if not even a copy fits into vector memory."""
    group, caches = q.shape[1] // k.shape[-2], [(cache, cache.shape[-2]) for cache in (k, v)]
    rows = _paged.rows_of_tile(1, group)
    return _paged.keys_of_blocks(q, caches, rows, _paged.piece_of(slots), most)


def _eights(a: Array) -> Array:
    """Means [b,x,…] with empty ones behind, up to a multiple of 8, the rows of a copy."""
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % 8), (0, 0), (0, 0)))
