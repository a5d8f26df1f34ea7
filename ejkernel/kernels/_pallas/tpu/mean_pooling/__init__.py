"""mean_pooling on TPU: Pallas kernels, compiled by Mosaic.

Pallas is imported only when a kernel is first needed.
"""

from functools import partial

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import SMEM_BYTES, refuses
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.mean_pooling import MeanPoolingConfig


def supports(spec: MeanPoolingSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .configs import table_bytes

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.x.dtype.name not in ("bfloat16", "float32"):
        return f"x is {operands.x.dtype}; the kernels take bfloat16 and float32"
    if 0 in operands.x.shape:
        return "no tokens or no features"
    if (features := operands.x.shape[2]) > 8192 and features % 128:
        return f"x has {features} features; beyond 8192 the kernels take multiples of 128"
    if (size := table_bytes(operands, spec)) > SMEM_BYTES:
        return f"the work list takes {size} bytes; scalar memory holds {SMEM_BYTES}"
    return None


_kernels = KernelTrio(
    __name__,
    "mean_pooling",
    MeanPoolingSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.TPU,
    priority=100,
    config=MeanPoolingConfig,
    refuses=partial(refuses, blocks=("block_s", "block_d")),
)

mean_pooling = _kernels.forward("kernels", supports)
mean_pooling_jvp = _kernels.tangent("kernels", supports)
mean_pooling_bwd = _kernels.backward("kernels", supports)

_kernels.register("mean_pooling", mean_pooling, mean_pooling_jvp, mean_pooling_bwd)
