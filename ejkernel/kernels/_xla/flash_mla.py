"""flash_mla in plain JAX: flash_attention of the keys and values of all heads, expanded from the latents.

The mathematics is in `_flash_mla`, and in `_absorbed_mla` for the forward of few queries, which attend to the latents.
The gradients of keys and values are in the dtype of statistics here, so that those of the latents and projections,
which sum them over heads and positions, are rounded only once.
"""

from dataclasses import replace
from functools import partial

import jax
from jax import Array

from ejkernel.primitives import flash_attention as algorithm
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import KernelConfig, Target

from .. import _absorbed_mla as absorbed
from .. import _flash_mla as expanded
from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from . import _attention as attention
from . import _tiles as tiles
from . import flash_attention as flash
from ._batch import one_by_one


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why these functions cannot keep what the spec promises, or None, as in flash_attention."""
    return flash.supports(spec, operands.shapes(operands.q.dtype), target)


def heuristic(spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    """The heuristic config of flash_attention."""
    return tiles.heuristic(spec, operands.shapes(operands.q.dtype), target)


def space(spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The configs of flash_attention."""
    return tiles.space(spec, operands.shapes(operands.q.dtype), target)


def reference(*operands, spec=FlashAttentionSpec()) -> Outputs:
    """The formula of flash_attention with the expanded keys and values."""
    return flash.reference(*expanded.expanded(Operands(*operands)), spec=spec)


@kernel_registry.register("flash_mla", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """The results o and lse of flash_mla, in XLA."""
    operands = Operands(*operands)
    if spec.batch_invariant:
        alone = partial(flash_mla, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), operands, operands.q.shape[0]))
    of = absorbed if absorbed.absorbs(operands, spec) else expanded
    return of.forward(flash.flash_attention, operands, spec, config)


@kernel_registry.register("flash_mla_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(flash_mla_jvp, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), (primals, outputs, tangents), primals.q.shape[0]))
    return expanded.tangent(flash.flash_attention_jvp, primals, outputs, tangents, spec, config)


@kernel_registry.register("flash_mla_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(flash_mla_bwd, wrt=wrt, spec=replace(spec, batch_invariant=False), config=config)
        batch = primals.q.shape[0]
        summed = [n for n, name in enumerate(wrt) if getattr(primals, name).shape[0] < batch]
        return tuple(one_by_one(lambda x: alone(*x), (primals, outputs, cotangents), batch, summed))
    return expanded.backward(_attention_backward, primals, outputs, cotangents, wrt, spec, config)


def _attention_backward(
    primals: algorithm.Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[Array, ...]:
    """The backward of flash_attention, with the gradients of keys and values in the dtype of statistics."""
    wide = partial(jax.ShapeDtypeStruct, dtype=attention.statistics_dtype(primals.q.dtype))
    of = primals._replace(k=wide(primals.k.shape), v=wide(primals.v.shape))
    return flash.backward(of, outputs, cotangents, wrt, spec, *tiles.cut(primals, spec, config))
