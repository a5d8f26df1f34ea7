"""Which configs the kernels of grouped_matmul are run with: one by heuristics, and the space that tuning searches.

block_m is the rows of a tile of the result, block_n its columns, block_k how much is multiplied at a time. The large
tiles are for many rows a group, where the tensor cores are what limits; the small ones for few, where reading the
matrices does.
"""

import numpy as np

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

# (block_m, block_n, block_k, num_warps, num_stages)
LARGE = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 4))
BACKWARD_LARGE = ((128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 32, 4, 6))
BACKWARD = ((128, 128, 64, 4, 3), (128, 128, 32, 4, 6), (128, 256, 64, 8, 4))
MIDDLE = ((64, 256, 64, 4, 3), (64, 128, 64, 4, 4), (128, 128, 64, 4, 3))
SMALL = ((16, 256, 64, 4, 4), (32, 128, 64, 4, 4), (16, 128, 128, 4, 4), (64, 256, 64, 4, 3))
# Weights of 8 bits, which are converted on the way to a product: of two programs on a multiprocessor one converts while
# the other multiplies.
NARROW_LARGE = ((128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 128, 4, 2))
NARROW_MIDDLE = ((64, 128, 128, 4, 3), (64, 256, 64, 4, 3), (32, 128, 128, 4, 4))
NARROW_SMALL = ((16, 128, 128, 4, 4), (16, 256, 64, 4, 4), (32, 128, 128, 4, 4), (64, 128, 128, 4, 3))
FLOAT16 = ((128, 128, 64, 8, 3), (64, 128, 64, 8, 3))  # with sums in float32, which need registers of their own
FLOAT32 = ((64, 64, 16, 8, 2),)
OLDER = ((128, 128, 32, 4, 3), (64, 128, 32, 4, 3))
SMALLEST = (16, 32, 32, 4, 1)  # where none of a list fits into the shared memory of the target


def space(operation: str, operands: Operands, spec: GroupedMatmulSpec, target: Target) -> list[GroupedMatmulConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    candidates, limit = _candidates(operation, operands, spec, target), shared_memory_limit(target)
    fitting = [sizes for sizes in candidates if tiles_memory(operands, *sizes) <= limit] or [SMALLEST]
    return [
        GroupedMatmulConfig(
            block_m=rows,
            block_n=columns,
            block_k=depth,
            num_warps=warps,
            num_stages=stages,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for rows, columns, depth, warps, stages in fitting
    ]


def shared_memory(operation: str, operands: Operands, config: GroupedMatmulConfig) -> int:
    """`tiles_memory` of a config, the same for every product."""
    sizes = (config.block_m, config.block_n, config.block_k, config.num_warps, config.num_stages)
    return tiles_memory(operands, *sizes)


def tiles_memory(operands: Operands, rows: int, columns: int, depth: int, warps: int, stages: int) -> int:
    """Bytes of the tiles that a program keeps in shared memory, those that stream by num_stages times.

    A factor that is computed is written there once more, and so is the result on its way to whole lines of memory.
    """
    lhs, rhs = (np.dtype(x.dtype).itemsize for x in (operands.lhs, operands.rhs))
    computed = rows * depth * lhs if operands.rhs_scale is not None or operands.lhs.dtype == np.float16 else 0
    converted = depth * columns * lhs if rhs != lhs else 0
    streamed = stages * depth * (rows * lhs + columns * rhs)
    return max(streamed + computed + converted, 4 * rows * columns)


def _candidates(operation: str, operands: Operands, spec: GroupedMatmulSpec, target: Target) -> tuple:
    lhs, rhs = operands.lhs, operands.rhs
    if lhs.dtype == np.float32:
        return FLOAT32
    if target.multiplies_from_registers:
        return OLDER
    backward, rows = operation == "grouped_matmul_bwd", lhs.shape[1] / rhs.shape[1]
    in_float32 = operands.rhs_scale is not None if backward else spec.preferred_element_type == "float32"
    if lhs.dtype == np.float16 and in_float32:
        return FLOAT16
    if rhs.dtype != lhs.dtype:
        return NARROW_LARGE if rows > 96 else NARROW_MIDDLE if rows > 24 else NARROW_SMALL
    if backward:
        return BACKWARD_LARGE if rows >= 768 else BACKWARD
    if rows > 96:
        return LARGE
    return MIDDLE if rows > 24 else SMALL
