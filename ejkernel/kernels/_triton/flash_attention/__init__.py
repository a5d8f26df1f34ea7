"""flash_attention in Triton: the portable GPU tier (CUDA from sm_80 on, and ROCm)."""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Target

from .backward import flash_attention_bwd
from .forward import flash_attention
from .tangent import flash_attention_jvp

__all__ = ["flash_attention", "flash_attention_bwd", "flash_attention_jvp", "supports", "supports_bwd"]


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    if reason := _launch.missing():
        return reason
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.compute_capability / 10}"
    if operands.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {operands.q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256 or size % 8:
            return f"{name} has {size} features; Triton's kernels take multiples of 8 up to 256"
    return None


def supports_bwd(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if operands.bias is not None and operands.cu_seqlens_q is not None:
        return "the gradient of a bias over packed sequences"
    return supports(spec, operands, target)
