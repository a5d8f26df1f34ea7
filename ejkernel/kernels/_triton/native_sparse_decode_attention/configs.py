"""The configs of the kernels of native_sparse_decode_attention: block_k keys of a step, block_q keys of a program."""

import jax

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import native_sparse_blocks
from ejkernel.kernels._triton._launch import shared_memory_limit
from ejkernel.kernels._triton.native_sparse_attention.configs import power_of_two
from ejkernel.kernels._triton.native_sparse_blocks import configs as configs_of_choice
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec
from ejkernel.primitives.native_sparse_blocks import Operands as Choice
from ejkernel.primitives.native_sparse_decode_attention import NativeSparseDecodeAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

# (block_q, block_k, num_warps, num_stages)
HALF = ((128, 64, 4, 2), (256, 64, 4, 3), (512, 64, 4, 3), (256, 32, 4, 3), (128, 32, 4, 2), (64, 16, 4, 1))
LARGE = ((256, 32, 4, 2), (128, 32, 4, 2), (64, 16, 4, 1))
SINGLE = ((128, 32, 4, 2), (256, 32, 4, 2), (256, 16, 4, 2), (64, 16, 4, 1))
# (block_k, num_stages) of the kernel that chooses blocks: block_k mean keys of a step
CHOICE = ((64, 3), (32, 2), (16, 1))


def space(
    operation: str, operands: Operands, spec: NativeSparseDecodeAttentionSpec, target: Target
) -> list[KernelConfig]:
    """The candidates that fit into the shared memory of the target; the smallest one if none does."""
    found = [
        KernelConfig(part, step, 16, warps, stages, platform=Platform.TRITON, backend=Backend.GPU)
        for part, step, warps, stages in _candidates(operands)
    ]
    limit = shared_memory_limit(target)
    return [config for config in found if shared_memory(operation, operands, config) <= limit] or found[-1:]


def _candidates(operands: Operands) -> tuple[tuple[int, ...], ...]:
    """The candidates for a dtype and a number of rows, whose tiles need not spill registers."""
    if operands.q.dtype.itemsize == 4:
        return SINGLE
    return HALF if rows_of(operands) < 64 else LARGE


def choice_config(x: Operands, spec: NativeSparseDecodeAttentionSpec) -> KernelConfig | None:
    """The config of the kernel that chooses blocks, with a query a tile; None where it does not take the operands."""
    (b, h, d), (_, means, g, _), target = x.q.shape, x.k_cmp.shape, gpu_target()
    q, k = (jax.ShapeDtypeStruct(of, x.q.dtype) for of in ((b, 1, h, d), (b, means * spec.block_size, g, d)))
    operands, of_choice = Choice(q, k, x.ranks), NativeSparseBlocksSpec(spec.block_size, spec.softmax_scale)
    if native_sparse_blocks.supports(of_choice, operands, target):
        return None
    # With more, registers spill.
    fewer = 2 if x.q.dtype.itemsize == 4 else rows_of(x) // 64
    rows = rows_of(x)
    found = [KernelConfig(rows, keys, 16, max(4, rows // 8), stages) for keys, stages in CHOICE[fewer:]]
    needed = lambda config: configs_of_choice.shared_memory("native_sparse_blocks", operands, config)
    return next((config for config in found if needed(config) <= shared_memory_limit(target)), found[-1])


def rows_of(operands: Operands) -> int:
    """The rows of a tile: the query heads of a group, padded to a power of two of at least 16."""
    return power_of_two(operands.q.shape[1] // operands.k.shape[2])


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """An upper bound of the bytes of shared memory: a tile of queries, and keys and values in the stages.

    As the lists say where keys are, loads of three stages need a fourth; for wgmma each stage is there twice. In
    float32, whose products are of parts, queries are there twice.
    """
    del operation
    (*_, d), (*_, e), size = operands.q.shape, operands.v.shape, operands.q.dtype.itemsize
    d, e, rows = power_of_two(d), power_of_two(e), rows_of(operands)
    stages = max(1, config.num_stages)
    stages = 2 * stages if rows >= 64 else stages + (stages > 2)
    tiles = (2 if size == 4 else 1) * rows * d + stages * config.block_k * (d + e)
    return size * tiles + 1024


def least_memory(operands: Operands) -> int:
    """Bytes of shared memory of the smallest config."""
    return shared_memory("native_sparse_decode_attention", operands, KernelConfig(64, 16, 16, 4, 1))
