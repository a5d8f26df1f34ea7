"""flash_attention in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Target


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
    features = dict(q=operands.q.shape[3], v=operands.v.shape[3])
    reason = _launch.refusal(target) or _launch.dtype_refusal("q", operands.q) or _launch.features_refusal(**features)
    if reason:
        return reason
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    from .configs import SMALLEST, tiles_memory

    return _launch.memory_refusal(tiles_memory(operation, operands, *SMALLEST), target)


_kernels = _launch.trio(__name__, "flash_attention", FlashAttentionSpec, Operands, Outputs)

flash_attention = _kernels.forward("forward", supports)
flash_attention_jvp = _kernels.tangent("tangent", supports_jvp)
flash_attention_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("flash_attention", flash_attention, flash_attention_jvp, flash_attention_bwd)
