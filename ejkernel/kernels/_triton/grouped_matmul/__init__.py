"""grouped_matmul in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._grouped_matmul import scale_varies_alone
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

LARGEST = 4096
"""Groups whose sizes a program keeps in registers."""


def supports(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    lhs, rhs = operands.lhs, operands.rhs
    if reason := _launch.refusal(target) or _launch.dtype_refusal("lhs", lhs):
        return reason
    if rhs.dtype.name.startswith("float8") and (target.compute_capability or 0) < 90:
        return f"rhs is {rhs.dtype}, which Triton converts only from compute capability 9.0 on"
    if operands.group_sizes.shape[1] > LARGEST:
        return f"{operands.group_sizes.shape[1]} groups; Triton's kernels take up to {LARGEST}"
    if 0 in lhs.shape:
        return "no rows or no features"
    from .configs import SMALLEST, tiles_memory

    return _launch.memory_refusal(tiles_memory(operands, *SMALLEST), target)


def supports_bwd(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return scale_varies_alone(operands) or supports(spec, operands, target)


_kernels = _launch.trio(__name__, "grouped_matmul", GroupedMatmulSpec, Operands, Outputs, GroupedMatmulConfig)

grouped_matmul = _kernels.forward("forward", supports)
grouped_matmul_jvp = _kernels.tangent("forward", supports)
grouped_matmul_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("grouped_matmul", grouped_matmul, grouped_matmul_jvp, grouped_matmul_bwd)
