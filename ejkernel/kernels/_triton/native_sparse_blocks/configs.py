"""The configs of the kernel of native_sparse_blocks.

block_q is the rows of a tile: neighbouring queries, each with the heads of its group. block_k is the blocks whose mean
keys are multiplied in a step. The first is the one that was fastest on an H200.
"""

from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.native_sparse_attention.configs import padded_group, power_of_two
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

# (block_q, block_k, num_warps, num_stages)
SMALLEST = (16, 16, 4, 1)
HALF = ((64, 32, 4, 2), (128, 32, 8, 2), (128, 32, 4, 2), (256, 32, 8, 2), (64, 16, 4, 1))
WIDE = ((128, 32, 8, 2), (64, 16, 8, 2), (64, 16, 4, 1))
SINGLE = ((64, 16, 8, 1),)
HOPPER_WIDE, HOPPER_SINGLE = (256, 32, 8, 2), (64, 32, 4, 1)


def space(operation: str, operands: Operands, spec: NativeSparseBlocksSpec, target: Target) -> list[KernelConfig]:
    """The candidates that fit into the shared memory of the target; the smallest one if none does."""
    sizes = [size for size in _candidates(operands, target) if size[0] >= _padded(operands)]
    found = [
        KernelConfig(rows, blocks, 16, warps, stages, platform=Platform.TRITON, backend=Backend.GPU)
        for rows, blocks, warps, stages in dict.fromkeys((*sizes, _smallest(operands)))
    ]
    limit = shared_memory_limit(target)
    return [config for config in found if shared_memory(operation, operands, config) <= limit] or found[-1:]


def _candidates(operands: Operands, target: Target) -> tuple[tuple[int, ...], ...]:
    """The candidates for a dtype and a number of features, whose tiles need not spill registers.

    Hopper multiplies from shared memory, so that larger tiles fit.
    """
    hopper = target.compute_capability == 90
    if operands.q.dtype.itemsize == 4:
        return (HOPPER_SINGLE, *SINGLE) if hopper else SINGLE
    if operands.q.shape[3] > 128:
        return (HOPPER_WIDE, *WIDE) if hopper else WIDE
    return HALF


def _smallest(operands: Operands) -> tuple[int, ...]:
    """The smallest tile, of the heads of one query at least."""
    rows, *rest = SMALLEST
    return max(rows, _padded(operands)), *rest


def _padded(operands: Operands) -> int:
    """The rows of one query in a tile."""
    return padded_group(operands.q.shape[2] // operands.k.shape[2])


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """An upper bound of the bytes of shared memory: tiles of queries and of mean keys, which are in two parts.

    In float32, whose products are of parts as well, both tiles are there twice besides the stages.
    """
    del operation
    width, size, stages = power_of_two(operands.q.shape[3]), operands.q.dtype.itemsize, max(1, config.num_stages)
    rows = max(config.block_q, _padded(operands))
    queries, means = rows * width, config.block_k * width
    tiles = 2 * queries + (stages + 1) * means if size == 4 else queries + 2 * stages * means
    return size * tiles + 4 * rows * config.block_k + 1024


def least_memory(operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    rows, blocks, *_ = _smallest(operands)
    return shared_memory("native_sparse_blocks", operands, KernelConfig(rows, blocks, 16, num_stages=1))
