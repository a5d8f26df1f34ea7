"""The configs of the kernels of blocksparse_attention: how many queries and keys a tile has.

A tile lies within one block of the mask: on each axis its size is that of the config, but at most the largest multiple
of 128 that divides a block. Large tiles need fewer steps of the grid, but waste more at the edges of causality or a
window: the heuristic counts the tiles within the band as if all blocks were kept.
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
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""

    def cost(tile):
        bundles = tile_bundles(_of_flash(operation), operands.attention, target, *tile)
        # A kernel has separate code for tiles with and without a mask.
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
    """The tile sizes that fit into blocks and into the memories of a core, and that compile in seconds."""
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
    """Bytes of scalar memory: a table of tiles for each head and batch element with its own mask, scale, and sinks."""
    b, h = operands.block_mask.shape[:2]
    batch, heads = operands.q.shape[0], operands.q.shape[2]
    varying = (operands.q_segment_ids, operands.mask, operands.cu_seqlens_q)
    rows = h * (batch if b > 1 or any(x is not None and x.shape[0] > 1 for x in varying) else 1)
    # Every block of queries, or of keys, has at least one tile. The kernel of dbias lists all tiles.
    number = _count(operands, spec, tile) if operands.bias is None else math.prod(_numbers(operands, tile))
    scalars = sum(x is not None for x in (operands.sinks, operands.softmax_scale)) * batch * heads
    return 4 * (rows * (number + sum(_numbers(operands, tile))) + scalars)


def _count(operands: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]) -> int:
    """The number of tiles of a head that are not fully masked by the band."""
    possible = possible_tiles(operands, spec, tile)
    return math.prod(_numbers(operands, tile)) if possible is None else int(possible[0].sum())


def _numbers(operands: Operands, tile: tuple[int, int]) -> tuple[int, int]:
    return tuple(math.ceil(x.shape[1] / size) for x, size in zip((operands.q, operands.k), tile, strict=True))


def _of_flash(operation: str) -> str:
    return operation.replace("blocksparse", "flash")
