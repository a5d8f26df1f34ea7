"""grouped_matmul on TPU: Pallas kernels, compiled by Mosaic.

Pallas is imported only when a kernel is first needed.
"""

from functools import partial

from ejkernel.kernels._grouped_matmul import scale_varies_alone
from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import SMEM_BYTES, refuses
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig


def supports(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    from .configs import table_bytes

    lhs, rhs = operands.lhs, operands.rhs
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if lhs.dtype.name not in ("bfloat16", "float32"):
        return f"lhs is {lhs.dtype}; the matrix unit takes bfloat16 and float32"
    if rhs.dtype.name not in (lhs.dtype.name, "int8"):
        return f"rhs is {rhs.dtype}; the kernels take the dtype of lhs and int8"
    if spec.preferred_element_type not in ("bfloat16", "float32"):
        return f"the result is {spec.preferred_element_type}; the kernels give bfloat16 and float32"
    if 0 in lhs.shape:
        return "no rows or no features"
    for name, size in (("contracted features", lhs.shape[2]), ("columns", rhs.shape[3])):
        if size > 8192 and size % 128:
            return f"{size} {name}; beyond 8192 the kernels take multiples of 128"
    if (size := table_bytes(operands)) > SMEM_BYTES:
        return f"the work list takes {size} bytes; scalar memory holds {SMEM_BYTES}"
    return None


def supports_bwd(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return scale_varies_alone(operands) or supports(spec, operands, target)


_kernels = KernelTrio(
    __name__,
    "grouped_matmul",
    GroupedMatmulSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.TPU,
    priority=100,
    config=GroupedMatmulConfig,
    refuses=partial(refuses, blocks=("block_m", "block_n")),
)

grouped_matmul = _kernels.forward("forward", supports)
grouped_matmul_jvp = _kernels.tangent("forward", supports)
grouped_matmul_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("grouped_matmul", grouped_matmul, grouped_matmul_jvp, grouped_matmul_bwd)
