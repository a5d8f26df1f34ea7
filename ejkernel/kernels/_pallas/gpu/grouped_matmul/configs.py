"""Which configs the backward of grouped_matmul is run with on Hopper.

A tile of the gradient of a matrix has block_m rows and block_n columns, and sums over block_k rows of a group at a
time. With four stages in flight, shared memory has space to store only half of a tile at once, which pays where groups
are long.
"""

from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.grouped_matmul import GroupedMatmulConfig

# (block_n, num_stages)
LONG = ((256, 4), (256, 3))
SHORT = ((256, 3), (256, 4), (128, 4))
LEAST_ROWS = 512  # of a long group
TAKES = {"block_n": (128, 256), "block_k": (64,), "num_stages": (3, 4)}


def space(operation: str, operands: Operands, spec: GroupedMatmulSpec, target: Target) -> list[GroupedMatmulConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    rows = operands.lhs.shape[1] / operands.rhs.shape[1]
    return [
        GroupedMatmulConfig(
            block_m=128,
            block_n=columns,
            block_k=64,
            num_warps=12,
            num_stages=stages,
            platform=Platform.PALLAS,
            backend=Backend.GPU,
        )
        for columns, stages in (LONG if rows >= LEAST_ROWS else SHORT)
    ]


def refuses(name: str, config: GroupedMatmulConfig) -> str | None:
    """What the kernel has against a config, or None."""
    del name
    for field, taken in TAKES.items():
        if (value := getattr(config, field)) not in taken:
            return f"config.{field} is {value}; the Mosaic GPU kernel takes {' or '.join(map(str, taken))}"
    return None
