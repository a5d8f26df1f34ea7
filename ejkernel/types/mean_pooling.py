"""The config of mean_pooling."""

from dataclasses import dataclass
from typing import ClassVar

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class MeanPoolingConfig(OperationConfig):
    """Tile sizes of the sum over tokens.

    Attributes:
        block_s: tokens of a tile.
        block_d: features of a tile, on GPUs and TPUs.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
    """

    block_s: int = 128
    block_d: int = 128
    num_warps: int = 4
    num_stages: int = 2

    from_kernel_config: ClassVar = {
        "block_s": "block_q",
        "block_d": "block_k",
        "num_warps": "num_warps",
        "num_stages": "num_stages",
    }
