"""native_sparse_blocks in plain JAX: the blocks with the best scores, for a chunk of queries at a time.

With c_x the mean key of block x, over the blocks that end at or before query i:

    p_ihx = exp(scale · q_ih·c_x) / Σ_x' exp(scale · q_ih·c_x')        score_ix = Σ_h p_ihx, over the heads h of a group

A list begins with the query's own block and the first block, whatever their scores; the others follow in order of
their scores, the highest first, and of equal ones the earlier.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target
from ejkernel.xla_utils.block_choice import chosen_blocks
from ejkernel.xla_utils.sequence_blocks import ended_blocks, mean_keys, places

from .._registry import Backend, Platform, configured_by, kernel_registry
from ._chunks import in_chunks


def heuristic(spec: NativeSparseBlocksSpec, operands: Operands, target: Target) -> KernelConfig:
    """As many queries at a time as keep their scores within the cache of a CPU, or small elsewhere."""
    (b, s, h, _), t = operands.q.shape, operands.k.shape[1]
    most = 2**20 if target.platform == "cpu" else 2**25
    of_query = b * h * (t // spec.block_size + 1)
    return KernelConfig(block_q=int(max(1, min(s, 2048, most // max(1, of_query)))), block_k=spec.block_size)


def space(spec: NativeSparseBlocksSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def reference(*operands: Any, spec: NativeSparseBlocksSpec = NativeSparseBlocksSpec()) -> Outputs:
    """The formula, with the scores of all queries."""
    return native_sparse_blocks(*operands, spec=spec, config=KernelConfig(block_q=operands[0].shape[1] or 1))


@kernel_registry.register("native_sparse_blocks", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
def native_sparse_blocks(
    *operands: Array | None,
    spec: NativeSparseBlocksSpec = NativeSparseBlocksSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The indices of the selected blocks, in XLA."""
    q, k, ranks, cu_seqlens = Operands(*operands)
    shared = cu_seqlens is not None and cu_seqlens.shape[0] == 1
    cu_seqlens = cu_seqlens[0] if shared else cu_seqlens
    of_each = partial(_blocks, count=ranks.shape[1], spec=spec, size=config.block_q)
    return Outputs(jax.vmap(of_each, in_axes=(0, 0, None if shared else 0))(q, k, cu_seqlens))


def _blocks(q: Array, k: Array, cu_seqlens: Array | None, *, count: int, spec: NativeSparseBlocksSpec, size: int):
    """The lists of blocks [s,g,count] of q [s,h,d] and k [t,g,d]."""
    (s, h, d), (t, g, _), block = q.shape, k.shape, spec.block_size
    place, means = places(cu_seqlens, s, t), mean_keys(k, cu_seqlens, block)
    before = jnp.zeros((s,), jnp.int32)
    if cu_seqlens is not None:
        before = ended_blocks(cu_seqlens, t, block).before[place.sequence]
    choice = dict(count=count, block_size=block, softmax_scale=spec.softmax_scale)

    def chunk(_, q, before, stop):
        return _, chosen_blocks(q, means, before, stop, **choice)

    return in_chunks(chunk, (), (q.reshape(s, g, h // g, d), before, place.stop), size)[1].astype(jnp.int32)
