"""The configs of the kernels of state_space_v1: chunk_size tokens of a chunk, and block_v channels of a program."""

from ejkernel.kernels._triton._launch import is_rocm
from ejkernel.primitives.state_space_v1 import Operands, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, block_v, num_warps) for a state of up to 16 numbers, and for a larger one
FORWARD = ((32, 16, 4), (16, 16, 4), (16, 16, 2), (16, 32, 4), (16, 32, 8))
DERIVATIVES = ((16, 16, 4), (16, 16, 8), (16, 32, 8))
LARGE = ((16, 16, 8),)


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The candidates, the most promising first."""
    del spec, target
    small = FORWARD if operation == "state_space_v1" else DERIVATIVES
    return [
        RecurrenceConfig(
            chunk_size=chunk, block_v=channels, num_warps=warps, num_stages=1, platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for chunk, channels, warps in (small if operands.A.shape[2] <= 16 else LARGE)
    ]  # fmt: skip


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """An upper bound of the bytes of shared memory, by which sums of a chunk's states change their layout.

    On AMD warps that share a scan pass it on by shared memory.
    """
    numbers = 1 << (operands.A.shape[2] - 1).bit_length()
    if is_rocm():
        return 8 * config.chunk_size * config.block_v * numbers + 1024
    tiles = 1 if operation == "state_space_v1" else 2
    return 8 * tiles * (config.chunk_size + config.block_v) * max(config.block_v, numbers) + 1024
