"""native_sparse_decode_attention in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when the kernels are first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands, Outputs
from ejkernel.types import Target

LARGEST_GROUP = 64


def supports(spec: NativeSparseDecodeAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    q, k, v = operands.q, operands.k, operands.v
    features = dict(q=q.shape[2], v=v.shape[3])
    reason = _launch.refusal(target) or _launch.dtype_refusal("q", q) or _launch.features_refusal(**features)
    if reason:
        return reason
    if 0 in (*q.shape, *k.shape):
        return "no sequences or no keys"
    # In float32 registers spill with more.
    largest = LARGEST_GROUP // 2 if q.dtype.name == "float32" else LARGEST_GROUP
    if (group := q.shape[1] // k.shape[2]) > largest:
        return f"{group} query heads share keys; Triton's kernels take up to {largest} in {q.dtype}"
    from .configs import least_memory

    return _launch.memory_refusal(least_memory(operands), target)


_kernels = _launch.trio(__name__, "native_sparse_decode_attention", NativeSparseDecodeAttentionSpec, Operands, Outputs)

native_sparse_decode_attention = _kernels.forward("kernels", supports)

_kernels.register("native_sparse_decode_attention", native_sparse_decode_attention)
