"""flash_attention on TPU: Pallas kernels for Mosaic, of the forward, its gradients and its tangent."""

import jax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .backward import backward
from .forward import forward
from .tangent import tangent


def flash_attention(*operands, spec=FlashAttentionSpec(), config=KernelConfig()) -> Outputs:
    """softmax(scale·q·kᵀ + bias, masked)·v and the logsumexp of its rows."""
    return forward(Operands(*operands), spec, config)


def flash_attention_jvp(
    primals: Operands, outputs: Outputs, tangents: Operands, *, spec: FlashAttentionSpec, config: KernelConfig
) -> Outputs:
    """The tangents of o and lse; a None tangent is zero."""
    return tangent(primals, outputs, tangents, spec, config)


def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """The cotangents of the operands named in `wrt`; a None cotangent is zero."""
    return backward(primals, outputs, cotangents, wrt, spec, config)
