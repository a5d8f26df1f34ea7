"""native_sparse_attention in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import Target

LARGEST_GROUP = 128


def supports(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return _reason("native_sparse_attention", operands, target)


def supports_jvp(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    features = max(operands.q.shape[3], operands.v.shape[3])
    if operands.q.dtype.name == "float32" and features > 128:
        return f"{features} features in float32; the tangent kernel takes up to 128: more spill registers"
    return _reason("native_sparse_attention_jvp", operands, target)


def supports_bwd(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return _reason("native_sparse_attention_bwd", operands, target)


def _reason(operation: str, operands: Operands, target: Target) -> str | None:
    features = dict(q=operands.q.shape[3], v=operands.v.shape[3])
    reason = _launch.refusal(target) or _launch.dtype_refusal("q", operands.q) or _launch.features_refusal(**features)
    if reason:
        return reason
    group = operands.q.shape[2] // operands.k.shape[2]
    # In float32 registers spill with more.
    largest = LARGEST_GROUP // 2 if operands.q.dtype.name == "float32" else LARGEST_GROUP
    if group > largest:
        return f"{group} query heads share keys; Triton's kernels take up to {largest} in {operands.q.dtype}"
    if any(0 in operands[n].shape for n in (0, 1, 3)):
        return "an empty batch, sequence or list"
    from .configs import least_memory

    return _launch.memory_refusal(least_memory(operation, operands), target)


_kernels = _launch.trio(__name__, "native_sparse_attention", NativeSparseAttentionSpec, Operands, Outputs)

native_sparse_attention = _kernels.forward("forward", supports)
native_sparse_attention_jvp = _kernels.tangent("tangent", supports_jvp)
native_sparse_attention_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register(
    "native_sparse_attention", native_sparse_attention, native_sparse_attention_jvp, native_sparse_attention_bwd
)
