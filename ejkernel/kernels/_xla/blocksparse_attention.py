"""blocksparse_attention in plain JAX: flash_attention over the tiles of the logits in kept blocks."""

import math
from dataclasses import replace
from functools import partial

from jax import Array

from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import KernelConfig, Target

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from . import _blocks as blocks
from . import flash_attention as flash
from ._batch import one_by_one

# The least rows and columns of a tile, and its most logits over all heads and batch elements that share it.
_SMALLEST, _MOST_LOGITS = 64, 2**20


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why these functions cannot keep what the spec promises, or None, as in flash_attention."""
    return flash.supports(spec, operands.attention, target)


def heuristic(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    """Tiles of one block, unless it is too small for an efficient step of the loop, or its logits exceed a cache.

    A tile of several blocks is computed as a whole if any of them is kept.
    """
    b, h = operands.block_mask.shape[:2]
    together = (1 if b > 1 else operands.q.shape[0]) * (1 if h > 1 else operands.q.shape[2])
    largest = max(_SMALLEST, min(512, math.isqrt(_MOST_LOGITS // max(1, together))))
    block_q, block_k = (min(max(n, _SMALLEST), largest) for n in spec.block_size)
    return KernelConfig(block_q=block_q, block_k=block_k)


def space(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The config of the heuristic alone."""
    return [heuristic(spec, operands, target)]


def reference(*operands, spec=BlocksparseAttentionSpec()) -> Outputs:
    """The formula: that of flash_attention, with the block mask as a mask of the size of the logits."""
    return flash.reference(*blocks.within_blocks(Operands(*operands), spec), spec=spec)


@kernel_registry.register("blocksparse_attention", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def blocksparse_attention(
    *operands: Array | None,
    spec: BlocksparseAttentionSpec = BlocksparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The results o and lse of blocksparse_attention, in XLA."""
    operands = Operands(*operands)
    if spec.batch_invariant:
        alone = partial(blocksparse_attention, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), operands, operands.q.shape[0]))
    return flash.forward(spec, *blocks.cut(operands, spec, config))


@kernel_registry.register("blocksparse_attention_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def blocksparse_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: BlocksparseAttentionSpec = BlocksparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(blocksparse_attention_jvp, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), (primals, outputs, tangents), primals.q.shape[0]))
    return flash.tangent(outputs, tangents.attention, spec, *blocks.cut(primals, spec, config))


@kernel_registry.register("blocksparse_attention_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def blocksparse_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: BlocksparseAttentionSpec = BlocksparseAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(blocksparse_attention_bwd, wrt=wrt, spec=replace(spec, batch_invariant=False), config=config)
        batch = primals.q.shape[0]
        summed = [n for n, name in enumerate(wrt) if getattr(primals, name).shape[0] < batch]
        return tuple(one_by_one(lambda x: alone(*x), (primals, outputs, cotangents), batch, summed))
    return flash.backward(primals, outputs, cotangents, wrt, spec, *blocks.cut(primals, spec, config))
