"""The configs of the kernels of blocksparse_attention: those of flash_attention, with tiles within blocks of the mask.

A tile lies within one block of the mask: on each axis its size is that of the config, but at most the largest power of
two that divides a block.
"""

from dataclasses import replace

from ejkernel.kernels._triton.flash_attention import configs as of_flash
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig, Target


def space(name: str, operands: Operands, spec: BlocksparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    configs = of_flash.space(_of_flash(name), operands.attention, spec, target)
    return list(dict.fromkeys(_fitting(name, config, operands, spec) for config in configs))


def shared_memory(name: str, operands: Operands, config: KernelConfig) -> int:
    """Bytes of the tiles that a program keeps in shared memory."""
    return of_flash.shared_memory(_of_flash(name), operands.attention, config)


def tile_sizes(operands: Operands, spec: BlocksparseAttentionSpec, rows: int, columns: int) -> tuple[int, int]:
    """The size of a tile of at most `rows` queries and `columns` keys; a mask of one block allows tiles of any size."""
    lengths = operands.q.shape[1], operands.k.shape[1]
    fitting = lambda size, block, length: size if block >= length else min(size, block & -block)
    return tuple(map(fitting, (rows, columns), spec.block_size, lengths))


def _fitting(name: str, config: KernelConfig, operands: Operands, spec: BlocksparseAttentionSpec) -> KernelConfig:
    """The config with tiles that fit into blocks; for small tiles four warps are enough.

    The backward has kernels with this tile, and with the transposed one.
    """
    block_q, block_k = tile_sizes(operands, spec, config.block_q, config.block_k)
    if name.endswith("_bwd"):
        of_queries, of_keys = tile_sizes(operands, spec, config.block_k, config.block_q)  # of the transposed tile
        block_q, block_k = max(block_q, of_keys), max(block_k, of_queries)
    warps = min(config.num_warps, 4) if block_q * block_k <= 32 * 64 < config.block_q * config.block_k else None
    return replace(config, block_q=block_q, block_k=block_k, num_warps=warps or config.num_warps)


def _of_flash(name: str) -> str:
    return name.replace("blocksparse", "flash")
