"""native_sparse_attention on Hopper GPUs: the forward of the selected branch, by a Pallas kernel of Mosaic GPU.

A kernel of Triton makes the unions of lists before it. Pallas is imported only when the kernel is first needed. The
tangent and the backward are Triton's.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.native_sparse_attention import NativeSparseAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target

from .._supports import refuses_given, refuses_target
from . import configs

# Query heads that share keys, of which a warpgroup has 64 rows; with fewer, queries in other blocks fill most of them.
GROUPS = (16, 32, 64)
# Features of keys and of values.
FEATURES, VALUE_FEATURES = (64, 128, 192), (64, 128)
# A thread block has twelve queries of 16 heads: the few of a decoding step would leave most of its rows empty.
LEAST_QUERIES = 64


def supports(spec: NativeSparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    wrong = refuses_target(target) or _launch.refusal(target) or refuses_given(operands, ("cu_seqlens",))
    if wrong:
        return wrong
    (_, queries, heads, features), (_, _, groups, value_features) = operands.q.shape, operands.v.shape
    if operands.q.dtype.name not in ("bfloat16", "float16"):
        return f"q is {operands.q.dtype}; the kernel takes bfloat16 and float16"
    if features not in FEATURES or value_features not in VALUE_FEATURES:
        sizes = f"{features} features of keys and {value_features} of values"
        return f"{sizes}; the kernel takes {', '.join(map(str, FEATURES))}, and {', '.join(map(str, VALUE_FEATURES))}"
    if heads // groups not in GROUPS:
        return f"{heads // groups} query heads share keys; the kernel takes {', '.join(map(str, GROUPS))}"
    if spec.block_size % configs.BLOCK_K:
        return f"block_size is {spec.block_size}; the kernel takes multiples of {configs.BLOCK_K}"
    if queries < LEAST_QUERIES or 0 in (*operands.q.shape, *operands.k.shape, *operands.block_indices.shape):
        return f"{queries} queries; the kernel takes {LEAST_QUERIES} or more, and no empty batch, keys or lists"
    if spec.softmax_scale <= 0:
        return f"softmax_scale is {spec.softmax_scale:g}; the kernel takes row maxima before scaling: it must be > 0"
    return None


_kernels = KernelTrio(
    __name__,
    "native_sparse_attention",
    NativeSparseAttentionSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.GPU,
    priority=200,
    custom_calls=_launch.CUSTOM_CALLS,
    refuses=configs.refuses,
    excess=lambda package, name, operands, config: configs.excess(operands, config),
)

native_sparse_attention = _kernels.forward("forward", supports)

_kernels.register("native_sparse_attention", native_sparse_attention)
