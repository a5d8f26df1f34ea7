"""flash_attention in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return _reason("flash_attention", operands, target)


def supports_jvp(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    return _reason("flash_attention_jvp", operands, target)


def supports_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if operands.bias is not None and operands.cu_seqlens_q is not None:
        return "the gradient of a bias over packed sequences is not supported by Triton's kernels"
    return _reason("flash_attention_bwd", operands, target)


def _reason(operation: str, operands: Operands, target: Target) -> str | None:
    if reason := _launch.refusal(target):
        return reason
    if operands.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {operands.q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256 or size % 8:
            return f"{name} has {size} features; Triton's kernels take multiples of 8 up to 256"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    from .configs import SMALLEST, tiles_memory

    return _launch.memory_refusal(tiles_memory(operation, operands, *SMALLEST), target)


_kernels = KernelTrio(
    __name__,
    "flash_attention",
    FlashAttentionSpec,
    Operands,
    Outputs,
    Platform.TRITON,
    Backend.GPU,
    priority=100,
    custom_calls=_launch.CUSTOM_CALLS,
    refuses=_launch.refuses,
    excess=_launch.excess,
)

flash_attention = _kernels.forward("forward", supports)
flash_attention_jvp = _kernels.tangent("tangent", supports_jvp)
flash_attention_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("flash_attention", flash_attention, flash_attention_jvp, flash_attention_bwd)
