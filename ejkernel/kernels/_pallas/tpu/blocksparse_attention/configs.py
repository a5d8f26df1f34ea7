"""Which configs the kernels of blocksparse_attention are run with: how many queries and keys a tile has.

A tile is within one block of the mask, and has as many queries and keys as the config says, but at most as the largest
multiple of 128 that divides a block. Large ones cost fewer steps of the grid, and what causality or a window wastes at
their edges: the heuristic counts the tiles that these leave, were all blocks kept.
"""

import itertools
import math

from ejkernel.kernels._pallas.tpu import SMEM_BYTES
from ejkernel.kernels._pallas.tpu.flash_attention.backward import DQ_BYTES
from ejkernel.kernels._pallas.tpu.flash_attention.configs import (
    BLOCK_K,
    BLOCK_Q,
    PROGRAM_BUNDLES,
    STEP_BUNDLES,
    TILE_BUNDLES,
    WORTH_TIMING,
    stages,
    tile_bundles,
    vmem_bytes,
)
from ejkernel.kernels._pallas.tpu.flash_attention.configs import PRODUCTS as OF_FLASH
from ejkernel.kernels._pallas.tpu.flash_attention.launch import VMEM_BYTES
from ejkernel.kernels._pallas.tpu.flash_attention.schedule import BLOCK_BITS
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .plan import possible_tiles, tile_sizes

PRODUCTS = tuple(name.replace("flash", "blocksparse") for name in OF_FLASH)


def space(operation: str, operands: Operands, spec: BlocksparseAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""

    def cost(tile):
        bundles = tile_bundles(_of_flash(operation), operands.attention, target, *tile)
        # Tiles that need a mask and those that do not have code of their own.
        return 2 * bundles > PROGRAM_BUNDLES, _count(operands, spec, tile) * (STEP_BUNDLES + bundles), -tile[0]

    return [
        KernelConfig(
            block_q=block_q,
            block_k=block_k,
            num_stages=stages(_of_flash(operation), target),
            platform=Platform.PALLAS,
            backend=Backend.TPU,
        )
        for block_q, block_k in sorted(fitting_tiles(operation, operands, spec, target), key=cost)[:WORTH_TIMING]
    ]


def fitting_tiles(
    operation: str, operands: Operands, spec: BlocksparseAttentionSpec, target: Target
) -> list[tuple[int, int]]:
    """The tiles that fit into blocks, that the memories of a core hold, and that compile in seconds."""
    flash, x, group = _of_flash(operation), operands.attention, operands.q.shape[2] // operands.k.shape[2]
    vmem = VMEM_BYTES - (DQ_BYTES if flash == "flash_attention_bwd" else 0)
    return [
        tile
        for tile in sorted({tile_sizes(operands, spec, *wanted) for wanted in itertools.product(BLOCK_Q, BLOCK_K)})
        if max(group * x.q.shape[1] / tile[0], x.k.shape[1] / tile[1]) < 1 << BLOCK_BITS - 1
        and scalar_bytes(operands, spec, tile) <= SMEM_BYTES
        and vmem_bytes(flash, x, *tile) <= vmem
        and tile_bundles(flash, x, target, *tile) <= TILE_BUNDLES
    ]


def scalar_bytes(operands: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> int:
    """Bytes of scalar memory: the table of the tiles of those heads and batch elements that differ, scale, sinks."""
    b, h = operands.block_mask.shape[:2]
    batch, heads = operands.q.shape[0], operands.q.shape[2]
    varying = (operands.q_segment_ids, operands.mask, operands.cu_seqlens_q)
    rows = h * (batch if b > 1 or any(x is not None and x.shape[0] > 1 for x in varying) else 1)
    # A block of queries, or of keys, has a tile at the least. A dbias kernel lists all of them.
    number = _count(operands, spec, tile) if operands.bias is None else math.prod(_numbers(operands, tile))
    scalars = sum(x is not None for x in (operands.sinks, operands.softmax_scale)) * batch * heads
    return 4 * (rows * (number + sum(_numbers(operands, tile))) + scalars)


def _count(operands: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> int:
    """Tiles of a head that the band leaves something of."""
    possible = possible_tiles(operands, spec, tile)
    return math.prod(_numbers(operands, tile)) if possible is None else int(possible[0].sum())


def _numbers(operands: Operands, tile: tuple[int, int]) -> tuple[int, int]:
    return tuple(math.ceil(x.shape[1] / size) for x, size in zip((operands.q, operands.k), tile, strict=True))


def _of_flash(operation: str) -> str:
    return operation.replace("blocksparse", "flash")
