"""Which configs the kernels of grouped_matmul are run with: tiles that fit vector memory.

block_q is the rows of a tile, block_k its columns, block_d how many features are multiplied at a time; the latter two
are cut down to what divides the array.
"""

from ejkernel.primitives.grouped_matmul import Operands
from ejkernel.types import Backend, KernelConfig, Platform

from .._visits import Visits, most_visits

# (block_q, block_k, block_d), the likeliest first.
MANY_ROWS = ((512, 1024, 1024), (512, 512, 1024), (256, 1024, 1024), (512, 512, 2048))
FEW_ROWS = ((128, 1024, 1024), (128, 512, 2048), (64, 1024, 1024))


def heuristic(operands: Operands) -> KernelConfig:
    """The config for a call (arrays or shapes) that was not tuned."""
    return space(operands)[0]


def space(operands: Operands) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    rows = operands.lhs.shape[1] / operands.rhs.shape[1]
    return [
        KernelConfig(block_q=rows, block_k=columns, block_d=depth, platform=Platform.PALLAS, backend=Backend.TPU)
        for rows, columns, depth in (MANY_ROWS if rows >= 256 else FEW_ROWS)
    ]


def table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call takes with the smallest tiles of its space."""
    (b, m, _), groups = operands.lhs.shape, operands.rhs.shape[1]
    smallest = min(config.block_q for config in space(operands))
    return 4 * len(Visits._fields) * b * most_visits(m, smallest, groups + 2)
