"""The problem and the mask info of a call, for the kernels of flash_attention."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._block_masks import kept_tiles
from ejkernel.kernels._pallas.tpu.flash_attention.problem import LANES, Problem, balanced, plan
from ejkernel.kernels._pallas.tpu.flash_attention.schedule import FULLY_MASKED, MaskInfo, TileMask
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.types import KernelConfig


def tile_sizes(operands: Operands, spec: BlocksparseAttentionSpec, block_q: int, block_k: int) -> tuple[int, int]:
    """The size of a tile of at most block_q queries and block_k keys, within one block and in whole lanes."""
    lengths = operands.q.shape[1], operands.k.shape[1]
    return tuple(map(_tile_size, lengths, spec.block_size, (block_q, block_k)))


def _tile_size(length: int, block: int, wanted: int) -> int:
    if block >= length:
        return balanced(length, wanted)
    return max(size for size in range(LANES, max(LANES, min(block, wanted)) + 1, LANES) if block % size == 0)


def sparse_plan(
    operands: Operands, spec: BlocksparseAttentionSpec, config: KernelConfig, chunk: int = 2 * LANES
) -> Problem:
    """The problem of a call; any key or query may be fully masked, as its blocks are not kept, and may hold NaN."""
    block_q, block_k = tile_sizes(operands, spec, config.block_q, config.block_k)
    of_flash = plan(operands.attention, spec, config, chunk)
    return replace(of_flash, block_q=block_q, block_k=block_k, chunk=math.gcd(block_k, chunk), hidden=True)


def possible_tiles(
    operands: Operands, spec: BlocksparseAttentionSpec, tile: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Which tiles the band does not fully mask, and which are full, [rows, columns]; None if more than that masks."""
    if any(x is not None for x in (operands.mask, operands.q_segment_ids, operands.cu_seqlens_q)):
        return None
    some, full = visibility_of(operands.attention, spec).blocks(*tile, np)
    return some[0], full[0]


def sparse_mask_info(operands: Operands, problem: Problem) -> MaskInfo:
    """The mask info of the tiles of kept blocks; all chunks of a tile are computed."""
    spec, tile, chunks = problem.spec, (problem.block_q, problem.block_k), problem.block_k // problem.chunk
    static = possible_tiles(operands, spec, tile)
    some, full = visibility_of(operands.attention, spec).blocks(*tile) if static is None else (x[None] for x in static)
    with_mask, without = TileMask(0, chunks, True), TileMask(0, chunks, False)
    tile_masks, numbers = (FULLY_MASKED, with_mask, without), jnp.where(full, 2, 1)
    if static is not None and not (some & ~full).any():
        tile_masks, numbers = (FULLY_MASKED, without), jnp.ones(full.shape, jnp.int32)
    numbers = jnp.where(kept_tiles(operands, spec.block_size, tile) & some[:, None], numbers[:, None], 0)
    numbers, heads = numbers.reshape(-1, *numbers.shape[2:]), numbers.shape[1]
    return MaskInfo(numbers, tile_masks, heads, None if static is None else static[0])


def queries_without_keys(operands: Operands, lse: Any, spec: BlocksparseAttentionSpec) -> Any:
    """[b,h?,s]: the queries that see no key in any kept block.

    Without sinks these have an lse of −∞. With sinks, where calls have neither segments nor masks, they are found by
    the interval of keys that a query sees and its kept blocks.
    """
    if operands.sinks is None:
        return lse == -jnp.inf
    block_q, block_k = spec.block_size
    first, stop = visibility_of(operands.attention, spec).intervals()
    rows, columns = operands.block_mask.shape[2:]
    in_blocks = lambda x: jnp.pad(x, ((0, 0), (0, rows * block_q - x.shape[1]))).reshape(
        x.shape[0], 1, rows, block_q, 1
    )
    begin = jnp.arange(columns, dtype=jnp.int32) * block_k
    meets = (in_blocks(first) < begin + block_k) & (begin < in_blocks(stop))
    sees = (meets & operands.block_mask[:, :, :, None]).any(-1)
    return ~sees.reshape(*sees.shape[:2], -1)[:, :, : operands.q.shape[1]]
