"""quantized_matmul on TPU: a Pallas kernel, compiled by Mosaic, for rows that fit into vector memory with their sums.

Codes are read from device memory once and become numbers in vector memory, where the matrix unit takes them. With more
rows the same codes would become numbers for each block of them; then XLA, which does it once, is left to it.
"""

import math
from functools import partial

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import refuses
from ejkernel.primitives.quantized_matmul import Operands, Outputs, QuantizedMatmulSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

BITS = (1, 2, 4, 8)
MOST_ROWS = 512


def supports(spec: QuantizedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .configs import LANES, MOST_WORDS, words_of_tile

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if spec.mode != "affine":
        return f"mode is {spec.mode}; the TPU kernel takes affine"
    if spec.bits not in BITS or spec.group_size * spec.bits % 32:
        return f"groups of {spec.group_size} codes of {spec.bits} bits; the TPU kernel takes whole words of whole codes"
    if operands.x.dtype.name not in ("bfloat16", "float32"):
        return f"x is {operands.x.dtype}; the matrix unit takes bfloat16 and float32"
    for name in ("scales", "zeros"):
        if (dtype := getattr(operands, name).dtype.name) not in ("bfloat16", "float32"):
            return f"{name} is {dtype}; the TPU kernel takes bfloat16 and float32"
    if any(a.shape[0] != 1 for a in (operands.w, operands.scales, operands.zeros)):
        return "w has a batch axis; the TPU kernel takes one matrix for all rows"
    if (tile := LANES * words_of_tile(math.prod(operands.w.shape[3:]), 1, spec)) > MOST_WORDS:
        return f"a tile of whole groups has {tile} words; the TPU kernel takes {MOST_WORDS}"
    rows = operands.x.shape[0] * operands.x.shape[1]
    if not 0 < rows <= MOST_ROWS:
        return (
            f"x has {rows} rows; the TPU kernel takes 1 to {MOST_ROWS}, and leaves more to XLA, which dequantises once"
        )
    return None


_kernels = KernelTrio(
    __name__,
    "quantized_matmul",
    QuantizedMatmulSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.TPU,
    priority=100,
    config=QuantizedMatmulConfig,
    refuses=partial(refuses, blocks=("block_m", "block_k")),
)

quantized_matmul = _kernels.forward("product", supports)
quantized_matmul_jvp = _kernels.tangent("product", supports)
quantized_matmul_bwd = _kernels.backward("product", supports)

_kernels.register("quantized_matmul", quantized_matmul, quantized_matmul_jvp, quantized_matmul_bwd)
