"""The backward of grouped_matmul on Hopper GPUs: the gradient of the matrices by a Pallas kernel, in Mosaic GPU.

The forward and the gradient of the rows, the same product with the matrices transposed, are left to Triton.
Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._registry import kernel_registry
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

from .._supports import refuses_given, refuses_target
from . import configs

# The columns of a swizzled tile of 8 rows in shared memory, and the rows of a tile.
WIDTH, ROWS = 64, 64


def supports(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands (arrays or shapes), or None."""
    lhs, rhs = operands.lhs, operands.rhs
    if wrong := refuses_target(target):
        return wrong
    if lhs.dtype.name not in ("bfloat16", "float16") or rhs.dtype != lhs.dtype:
        return f"lhs is {lhs.dtype} and rhs {rhs.dtype}; the kernel takes bfloat16 or float16, the same for both"
    if 0 in lhs.shape or lhs.shape[1] % 8:
        return f"lhs has {lhs.shape[1]} rows; the kernel takes multiples of 8"
    if lhs.shape[2] % WIDTH or rhs.shape[3] % WIDTH:
        return f"{lhs.shape[2]} features and {rhs.shape[3]} columns; the kernel takes multiples of {WIDTH}"
    if lhs.shape[1] < ROWS * rhs.shape[1]:
        return f"{lhs.shape[1]} rows for {rhs.shape[1]} groups; the tiles of the kernel need {ROWS} rows a group"
    if rhs.shape[0] < lhs.shape[0]:
        return "rhs is shared by a batch, over which the kernel does not sum its gradient"
    return refuses_given(operands, ("rhs_scale",))


_kernels = KernelTrio(
    __name__,
    "grouped_matmul",
    GroupedMatmulSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.GPU,
    priority=200,
    config=GroupedMatmulConfig,
    refuses=configs.refuses,
    custom_calls=kernel_registry.find("grouped_matmul", Platform.TRITON, Backend.GPU).implementation.custom_calls,
)

grouped_matmul_bwd = _kernels.backward("backward", supports)

_kernels.register("grouped_matmul", grouped_matmul_bwd)
