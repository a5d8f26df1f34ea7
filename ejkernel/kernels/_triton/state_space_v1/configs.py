"""The configs of the kernels of state_space_v1: chunk_size tokens of a chunk, and block_v channels of a program.

A state is kept before each chunk, from which the backward computes those within. A warp has 16 channels with 16 numbers
of their states, with which rows of channels and of numbers are summed without shared memory.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton._recurrence.problem import padded
from ejkernel.kernels._triton._recurrence.step import LONGEST
from ejkernel.primitives.state_space_v1 import Operands, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, block_v), the fastest on an H200 first. A few tokens read and write little but the state.
FEW, FORWARD, DERIVATIVES = ((16, 32), (16, 16)), ((16, 16), (16, 32)), ((16, 16), (32, 16), (16, 32))
NUMBERS_PER_WARP = 256


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The candidates that fit into the shared memory of the target, the most promising first."""
    del spec
    limit = shared_memory_limit(target)
    return [
        config for config in _candidates(operation, operands) if shared_memory(operation, operands, config) <= limit
    ]


def _candidates(operation: str, operands: Operands) -> list[RecurrenceConfig]:
    numbers = padded(operands.A.shape[2])
    forward = FEW if operands.x.shape[1] <= LONGEST else FORWARD
    return [
        RecurrenceConfig(
            chunk_size=chunk, block_v=channels, num_warps=min(8, channels * numbers // NUMBERS_PER_WARP), num_stages=1,
            platform=Platform.TRITON, backend=Backend.GPU,
        )
        for chunk, channels in (forward if operation == "state_space_v1" else DERIVATIVES)
    ]  # fmt: skip


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """An upper bound of the bytes of shared memory: sums of rows over the channels of several warps."""
    del operation
    return 4 * config.num_warps * max(config.block_v, padded(operands.A.shape[2]))


def least_memory(operation: str, operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    return min(shared_memory(operation, operands, config) for config in _candidates(operation, operands))
