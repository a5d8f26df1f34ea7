"""flash_attention in Triton: the portable GPU tier (CUDA from sm_80 on, and ROCm).

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "rocm" and target.device_kind is None:
        return "jax-triton compiles for rocm only where such a GPU is"
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.compute_capability / 10}"
    if reason := _launch.missing():
        return reason
    if operands.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {operands.q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256 or size % 8:
            return f"{name} has {size} features; Triton's kernels take multiples of 8 up to 256"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    return None


def supports_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if operands.bias is not None and operands.cu_seqlens_q is not None:
        return "the gradient of a bias over packed sequences"
    return supports(spec, operands, target)


def _heuristic(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operation, operands, spec, target)


def _space(operation: str, spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operation, operands, spec, target)


def _registered(operation: str, predicate):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.TRITON, Backend.GPU, PRIORITY)
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    emitting = emits(*_launch.CUSTOM_CALLS)
    return lambda implementation: register(supported_if(predicate)(configured(emitting(implementation))))


@_registered("flash_attention", supports)
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse."""
    from .forward import flash_attention

    return flash_attention(*operands, spec=spec, config=config)


@_registered("flash_attention_jvp", supports)
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


@_registered("flash_attention_bwd", supports_bwd)
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
