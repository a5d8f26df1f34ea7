"""quantized_matmul in Triton: products of few rows, as in decoding (CUDA from sm_80 on, and ROCm).

Codes are read once, and become numbers on the way: in registers, in the layout of a product (registers.py), or beside
shared memory (kernels.py). With more rows the same codes would become numbers for each block of them; then XLA, which
does it once, is left to it.
Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.types import Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

BITS = (2, 4, 8)


def supports(spec: QuantizedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .configs import MOST_ROWS, smallest_memory

    if reason := _launch.refusal(target) or _launch.memory_refusal(smallest_memory(operands), target):
        return reason
    if spec.mode != "affine":
        return f"mode is {spec.mode}; Triton's kernel takes affine"
    if spec.bits not in BITS:
        return f"codes have {spec.bits} bits; Triton's kernel takes {', '.join(map(str, BITS))}"
    if operands.x.dtype.name not in ("bfloat16", "float16"):
        return f"x is {operands.x.dtype}; Triton's kernel takes bfloat16 and float16"
    if any(a.shape[0] != 1 for a in (operands.w, operands.scales, operands.zeros)):
        return "w has a batch axis; Triton's kernel takes one matrix for all rows"
    rows = operands.x.shape[0] * operands.x.shape[1]
    if not 0 < rows <= MOST_ROWS:
        return (
            f"x has {rows} rows; Triton's kernel takes 1 to {MOST_ROWS}, and leaves more to XLA, which dequantises once"
        )
    return None


_kernels = _launch.trio(__name__, "quantized_matmul", QuantizedMatmulSpec, Operands, Outputs, QuantizedMatmulConfig)

quantized_matmul = _kernels.forward("kernels", supports, ("registers",))
quantized_matmul_jvp = _kernels.tangent("kernels", supports, ("registers",))
quantized_matmul_bwd = _kernels.backward("kernels", supports, ("registers",))

_kernels.register("quantized_matmul", quantized_matmul, quantized_matmul_jvp, quantized_matmul_bwd)
