"""Which configs the kernel of quantized_matmul is run with: block_n columns of a tile, block_k features at a time.

block_m is all rows, a power of two from 16 on; with fewer than all the kernel reads the codes for each block of them.
The order is that of the times on an H200.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.quantized_matmul import Operands, QuantizedMatmulSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.quantized_matmul import QuantizedMatmulConfig

# (columns, features, warps, stages); with the most rows of a tile the first two change places.
TILES = ((64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 3), (128, 128, 8, 3), (32, 64, 2, 4))
SMALLEST = (16, 16, 1, 1)  # where none of the list fits into the shared memory of the target
MOST_ROWS = 64


def space(operation: str, operands: Operands, spec: QuantizedMatmulSpec, target: Target) -> list[QuantizedMatmulConfig]:
    """Tiles that fit, the likeliest first."""
    limit = shared_memory_limit(target)
    first = TILES[:2] if rows_of_tile(operands) < MOST_ROWS else TILES[1::-1]
    configs = [_config(operands, tile) for tile in (*first, *TILES[2:], SMALLEST)]
    fitting = [config for config in configs[:-1] if shared_memory(operation, operands, config) <= limit]
    return fitting or configs[-1:]


def _config(operands: Operands, tile: tuple[int, int, int, int]) -> QuantizedMatmulConfig:
    columns, features, warps, stages = tile
    of = dict(platform=Platform.TRITON, backend=Backend.GPU)
    return QuantizedMatmulConfig(rows_of_tile(operands), columns, features, num_warps=warps, num_stages=stages, **of)


def rows_of_tile(operands: Operands) -> int:
    """All rows, a power of two, as far as a kernel takes them."""
    rows = min(MOST_ROWS, operands.x.shape[0] * operands.x.shape[1])
    return max(16, 1 << max(0, rows - 1).bit_length())


def smallest_memory(operands: Operands) -> int:
    """Bytes of shared memory of a program with the smallest tile."""
    columns, features, _, stages = SMALLEST
    return tiles_memory(rows_of_tile(operands), columns, features, stages, operands.x.dtype.itemsize)


def shared_memory(operation: str, operands: Operands, config: QuantizedMatmulConfig) -> int:
    """`tiles_memory` of a config."""
    sizes = (config.block_m, config.block_n, config.block_k, config.num_stages)
    return tiles_memory(*sizes, operands.x.dtype.itemsize)


def tiles_memory(rows: int, columns: int, features: int, stages: int, item: int) -> int:
    """Bytes of shared memory of a program, at the most.

    The rows, words, scales and zeros of each stage of the pipeline, and the numbers of a tile, which are brought to the
    layout of the product.
    """
    tile = columns * features
    stage = rows * features * item + tile + 2 * 4 * tile // 16
    return stages * stage + 4 * tile + 4 * rows * columns
