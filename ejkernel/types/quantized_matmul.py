"""The config of quantized_matmul."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class QuantizedMatmulConfig(OperationConfig):
    """How the product is divided.

    Attributes:
        columns_per_block: columns of the product that are computed at once. In XLA these are the columns of the matrix
            that exist as floats at one time.
    """

    columns_per_block: int = 1024
