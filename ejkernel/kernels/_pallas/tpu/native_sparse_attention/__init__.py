"""native_sparse_attention on TPU: tiles of neighbouring queries over the blocks of keys that any of them lists.

Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

LARGEST_GROUP = 128
LARGEST_BLOCK = 1024
# Positions are kept in float32, beside the statistics of rows, and have to be exact.
MOST_TOKENS = 2**24
LANES = 128


def supports(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return _reason("native_sparse_attention", spec, operands, target)


def supports_jvp(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    return _reason("native_sparse_attention_jvp", spec, operands, target)


def supports_bwd(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return _reason("native_sparse_attention_bwd", spec, operands, target)


def refuses(name: str, config: KernelConfig) -> str | None:
    """Why the kernels cannot run with a config, or None."""
    del name
    if config.block_q % LANES:
        return (
            f"config.block_q is {config.block_q}; the TPU kernels have rows of queries in lanes, a multiple of {LANES}"
        )
    return None


def _reason(operation: str, spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    x = operands
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if x.q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {x.q.dtype}; the matrix unit takes bfloat16 and float32"
    for name, size in (("q", x.q.shape[3]), ("v", x.v.shape[3])):
        if size > 256:
            return f"{name} has {size} features; the kernels take up to 256"
    if (group := x.q.shape[2] // x.k.shape[2]) > LARGEST_GROUP:
        return f"{group} query heads share keys; the kernels take up to {LARGEST_GROUP}"
    if any(0 in array.shape for array in (x.q, x.k, x.v, x.block_indices)):
        return "an empty batch, sequence or list"
    if spec.block_size > LARGEST_BLOCK:
        return f"blocks of {spec.block_size} keys; the kernels take up to {LARGEST_BLOCK}"
    if max(x.q.shape[1], x.k.shape[1]) > MOST_TOKENS:
        return f"{max(x.q.shape[1], x.k.shape[1])} tokens; positions in float32 are exact up to {MOST_TOKENS}"
    from .configs import fitting

    if not fitting(operation, operands, spec):
        return "the tile table exceeds scalar memory (SMEM), or the blocks exceed vector memory (VMEM)"
    return None


_kernels = KernelTrio(
    __name__,
    "native_sparse_attention",
    NativeSparseAttentionSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.TPU,
    priority=100,
    refuses=refuses,
)

native_sparse_attention = _kernels.forward("forward", supports)
native_sparse_attention_jvp = _kernels.tangent("tangent", supports_jvp)
native_sparse_attention_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register(
    "native_sparse_attention", native_sparse_attention, native_sparse_attention_jvp, native_sparse_attention_bwd
)
