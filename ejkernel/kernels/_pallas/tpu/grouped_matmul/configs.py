"""The configs of the kernels of grouped_matmul: tiles that fit into vector memory.

block_m is the rows of a tile, block_n its columns, and block_k the features that a step sums over; the latter two are
cut down to divisors of the array's sizes.
"""

from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

from .._work_list import WorkItem, most_work_items

# (block_m, block_n, block_k), the most promising first.
MANY_ROWS = ((512, 1024, 1024), (512, 512, 1024), (256, 1024, 1024), (512, 512, 2048))
FEW_ROWS = ((128, 1024, 1024), (128, 512, 2048), (64, 1024, 1024))


def space(operation: str, operands: Operands, spec: GroupedMatmulSpec, target: Target) -> list[GroupedMatmulConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    return [
        GroupedMatmulConfig(block_m=rows, block_n=columns, block_k=depth, platform=Platform.PALLAS, backend=Backend.TPU)
        for rows, columns, depth in _candidates(operands)
    ]


def table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call needs with the smallest tiles of its space."""
    (b, m, _), groups = operands.lhs.shape, operands.rhs.shape[1]
    smallest = min(rows for rows, _, _ in _candidates(operands))
    return 4 * len(WorkItem._fields) * b * most_work_items(m, smallest, groups + 2)


def _candidates(operands: Operands) -> tuple:
    rows = operands.lhs.shape[1] / operands.rhs.shape[1]
    return MANY_ROWS if rows >= 256 else FEW_ROWS
