"""mean_pooling in Triton: the portable GPU kernels (CUDA from sm_80 on, and ROCm).

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import Target
from ejkernel.types.mean_pooling import MeanPoolingConfig


def supports(spec: MeanPoolingSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if reason := _launch.refusal(target) or _launch.dtype_refusal("x", operands.x):
        return reason
    if 0 in operands.x.shape:
        return "no tokens or no features"
    from .configs import SMALLEST, tiles_memory

    return _launch.memory_refusal(tiles_memory(*SMALLEST), target)


_kernels = _launch.trio(__name__, "mean_pooling", MeanPoolingSpec, Operands, Outputs, MeanPoolingConfig)

mean_pooling = _kernels.forward("kernels", supports)
mean_pooling_jvp = _kernels.tangent("kernels", supports)
mean_pooling_bwd = _kernels.backward("kernels", supports)

_kernels.register("mean_pooling", mean_pooling, mean_pooling_jvp, mean_pooling_bwd)
