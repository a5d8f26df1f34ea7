"""The config of grouped_matmul."""

from dataclasses import dataclass
from typing import ClassVar

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class GroupedMatmulConfig(OperationConfig):
    """Tile sizes of the product [M, K] × [K, N] of a group; in the gradient of a matrix it is [K, M] × [M, N].

    Attributes:
        block_m: rows of a tile of the result.
        block_n: columns of a tile of the result.
        block_k: how much is summed over at a time.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 2

    from_kernel_config: ClassVar = {
        "block_m": "block_q",
        "block_n": "block_k",
        "block_k": "block_d",
        "num_warps": "num_warps",
        "num_stages": "num_stages",
    }
