"""The config of quantized_matmul."""

from dataclasses import dataclass
from typing import ClassVar

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class QuantizedMatmulConfig(OperationConfig):
    """Tile sizes of the product [M, K] × [K, N] with quantised weights.

    Attributes:
        block_m: rows of a tile of a GPU.
        block_n: columns of a tile; in XLA those whose weights are dequantised at once.
        block_k: features that a tile of a GPU sums over at a time.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
        algorithm: a variant of the algorithm, where several exist.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2
    algorithm: str | None = None

    from_kernel_config: ClassVar = {
        "block_m": "block_q",
        "block_n": "block_k",
        "block_k": "block_d",
        "num_warps": "num_warps",
        "num_stages": "num_stages",
        "algorithm": "algorithm",
    }
