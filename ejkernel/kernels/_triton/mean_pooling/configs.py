"""Which configs the kernels of mean_pooling are run with: block_s tokens and block_d features of a tile.

The first of each is the one that was fastest on an H200 over chunks of 64, texts and long texts: many small programs of
one warp hide each other's waits.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.mean_pooling import MeanPoolingConfig

# (tokens, features of two bytes, warps)
SUMS = ((32, 64, 1), (64, 64, 1), (64, 128, 1), (16, 512, 2), (16, 1024, 4))
SPREADS = ((32, 128, 1), (16, 512, 2), (64, 128, 1), (16, 1024, 4))
LARGEST_TILE = 128
SMALLEST = (16, 16, 1)  # where none of a list fits into the shared memory of the target


def space(operation: str, operands: Operands, spec: MeanPoolingSpec, target: Target) -> list[MeanPoolingConfig]:
    """Tiles of 16 to 64 tokens, or of the chunk that was asked for, and from 128 bytes to 2 KiB of features."""
    chunk = spec.chunk_size and min(LARGEST_TILE, max(16, 1 << (spec.chunk_size - 1).bit_length()))
    features, limit = max(16, 1 << (operands.x.shape[2] - 1).bit_length()), shared_memory_limit(target)
    candidates = [
        (chunk or tokens, min(features, max(16, 2 * width // operands.x.dtype.itemsize)), warps)
        for tokens, width, warps in (SPREADS if operation == "mean_pooling_bwd" else SUMS)
    ]
    return [
        MeanPoolingConfig(block_s=tokens, block_d=width, num_warps=warps, platform=Platform.TRITON, backend=Backend.GPU)
        for tokens, width, warps in [sizes for sizes in candidates if tiles_memory(*sizes) <= limit] or [SMALLEST]
    ]


def shared_memory(operation: str, operands: Operands, config: MeanPoolingConfig) -> int:
    """`tiles_memory` of a config."""
    return tiles_memory(config.block_s, config.block_d, config.num_warps)


def tiles_memory(tokens: int, features: int, warps: int) -> int:
    """Bytes of shared memory in which warps add up their sums."""
    return 4 * warps * features
