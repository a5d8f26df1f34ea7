"""flash_attention on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels cannot run on these operands (arrays or shapes), or None."""
    from .configs import PRODUCTS, fitting_blocks

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {operands.q.dtype}; the matrix unit takes bfloat16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256:
            return f"{name} has {size} features; the kernels take up to 256"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    if operands.dropout is not None:
        return "dropout: Philox multiplies 32-bit integers into 64 bits, which the vector unit does not"
    if not all(fitting_blocks(operation, operands, target) for operation in PRODUCTS):
        return "no blocks are large enough for scalar memory to hold the table of tiles, and small enough for a program"
    return None


def _heuristic(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operation, operands, spec, target)


def _space(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operation, operands, spec, target)


def _registered(operation: str):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.PALLAS, Backend.TPU, PRIORITY)
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    return lambda implementation: register(supported_if(supports)(configured(implementation)))


@_registered("flash_attention")
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse."""
    from .forward import flash_attention

    return flash_attention(*operands, spec=spec, config=config)


@_registered("flash_attention_jvp")
def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    from .tangent import flash_attention_jvp

    return flash_attention_jvp(primals, outputs, tangents, spec=spec, config=config)


@_registered("flash_attention_bwd")
def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    from .backward import flash_attention_bwd

    return flash_attention_bwd(primals, outputs, cotangents, wrt=wrt, spec=spec, config=config)
