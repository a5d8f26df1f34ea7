"""`ejkernel.lax.quantized_matmul`."""

from ..modules.operations.quantized_matmul import QuantizedMatmul
from ._native import native

quantized_matmul = native(QuantizedMatmul)
