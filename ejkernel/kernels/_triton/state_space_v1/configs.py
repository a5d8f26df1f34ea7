"""The configs of the kernels of state_space_v1: chunk_size tokens of a chunk, and block_v channels of a program."""

from ejkernel.kernels._triton._launch import is_rocm, shared_memory_limit
from ejkernel.kernels._triton._recurrence.problem import padded
from ejkernel.primitives.state_space_v1 import Operands, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, block_v, num_warps) for a state of up to 16 numbers, and for a larger one
FORWARD = ((32, 16, 4), (16, 16, 4), (16, 16, 2), (16, 32, 4), (16, 32, 8))
DERIVATIVES = ((16, 16, 4), (16, 16, 8), (16, 32, 8))
LARGE = ((16, 16, 8),)


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The candidates that fit into the shared memory of the target, the most promising first."""
    del spec
    limit = shared_memory_limit(target)
    return [
        config for config in _candidates(operation, operands) if shared_memory(operation, operands, config) <= limit
    ]


def _candidates(operation: str, operands: Operands) -> list[RecurrenceConfig]:
    small = FORWARD if operation == "state_space_v1" else DERIVATIVES
    return [
        RecurrenceConfig(
            chunk_size=chunk, block_v=channels, num_warps=warps, num_stages=1, platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for chunk, channels, warps in (small if operands.A.shape[2] <= 16 else LARGE)
    ]  # fmt: skip


def shared_memory(operation: str, operands: Operands, config: RecurrenceConfig) -> int:
    """An upper bound of the bytes of shared memory: sums of a chunk's states change their layout there.

    Derivatives add up over channels, with a part of each warp. On AMD warps that share a scan pass it on by shared
    memory.
    """
    chunk, channels, numbers = config.chunk_size, config.block_v, padded(operands.A.shape[2])
    if is_rocm():
        return 8 * chunk * channels * numbers + 1024
    if operation == "state_space_v1":
        return 4 * channels * max(chunk, numbers) + 1024
    return 4 * config.num_warps * channels * numbers + 1024


def least_memory(operation: str, operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    return min(shared_memory(operation, operands, config) for config in _candidates(operation, operands))
