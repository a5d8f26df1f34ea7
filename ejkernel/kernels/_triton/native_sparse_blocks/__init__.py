"""native_sparse_blocks in Triton: the portable GPU kernel (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when the kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands, Outputs
from ejkernel.types import Target

LARGEST_GROUP, MOST_BLOCKS, LONGEST_LIST = 64, 2**14, 1024


def supports(spec: NativeSparseBlocksSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    q, k = operands.q, operands.k
    reason = _launch.refusal(target) or _launch.dtype_refusal("q", q) or _launch.features_refusal(q=q.shape[3])
    if reason:
        return reason
    if 0 in (*q.shape, *k.shape) or k.shape[1] < spec.block_size:
        return "no queries, or no complete block of keys"
    if q.dtype.name == "float32" and q.shape[3] > 128:
        return f"{q.shape[3]} features in float32; Triton's kernel takes up to 128: more spill registers"
    if (group := q.shape[2] // k.shape[2]) > LARGEST_GROUP:
        return f"{group} query heads share keys; Triton's kernel takes up to {LARGEST_GROUP}"
    if (blocks := k.shape[1] // spec.block_size) > MOST_BLOCKS:
        return f"{blocks} blocks; Triton's kernel takes up to {MOST_BLOCKS}"
    if (count := operands.ranks.shape[1]) > LONGEST_LIST:
        return f"lists of {count} blocks; Triton's kernel takes up to {LONGEST_LIST}"
    from .configs import least_memory

    return _launch.memory_refusal(least_memory(operands), target)


_kernels = _launch.trio(__name__, "native_sparse_blocks", NativeSparseBlocksSpec, Operands, Outputs)

native_sparse_blocks = _kernels.forward("kernels", supports)

_kernels.register("native_sparse_blocks", native_sparse_blocks)
