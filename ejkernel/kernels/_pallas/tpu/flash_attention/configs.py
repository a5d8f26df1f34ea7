"""The configs of the kernels of flash_attention: how many queries and keys a tile has.

A step of the grid takes the time of its products in the matrix units, and a fixed time for a tile of any size: filling
the pipeline within the tile, addresses, branches. So tiles are large, but not so large that they waste more at the
edges of causality or a window. The heuristic counts the tiles of a call that are not fully masked, and what is computed
of them, and takes the cheapest blocks among those that fit into the memories of a core and whose program compiles in
seconds.
"""

import itertools
import math
import re

import numpy as np

from ejkernel.kernels._pallas.tpu import SMEM_BYTES
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .backward import DQ_BYTES
from .forward import forward_chunk
from .launch import VMEM_BYTES
from .problem import LANES, balanced, plan, round_up
from .schedule import BLOCK_BITS, mask_info_of

BLOCK_Q, BLOCK_K = (128, 256, 512, 1024), (128, 256, 512, 1024, 2048)
# The products of a tile. Forward: k·q and v·p. Backward: k·q, v·do, p·do, ds·q and ds·k. Tangent: k·q, v·p, k·q̇, k̇·q,
# v̇·p and v·(p·ẏ).
PRODUCTS = {"flash_attention": 2, "flash_attention_bwd": 5, "flash_attention_jvp": 6}
# A product of float32 is six products of bfloat16.
FLOAT32_PASSES = 6
# Instruction bundles of a step of the grid beside its products, counted in compiled programs.
STEP_BUNDLES = 400
# The code of a tile has no loops, and the compiler takes a millisecond to schedule each of its bundles; a program has
# this code once for each tile mask.
TILE_BUNDLES, PROGRAM_BUNDLES = 6144, 8192
WORTH_TIMING = 3


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    costs = {}
    for blocks in fitting_blocks(operation, operands, target):
        steps, computed, code = _tiles(operation, operands, spec, blocks)
        tile = tile_bundles(operation, operands, target, *blocks)
        # At equal cost, more queries per tile are better, as keys are loaded less often.
        costs[blocks] = code * tile > PROGRAM_BUNDLES, steps * STEP_BUNDLES + computed * tile, -blocks[0]
    return [
        KernelConfig(
            block_q=block_q,
            block_k=block_k,
            num_stages=stages(operation, target),
            platform=Platform.PALLAS,
            backend=Backend.TPU,
        )
        for block_q, block_k in sorted(costs, key=costs.get)[:WORTH_TIMING]
    ]


def fitting_blocks(operation: str, operands: Operands, target: Target) -> list[tuple[int, int]]:
    """The block sizes, cut down to the sequences, that fit into the memories of a core and compile in seconds."""
    queries, keys = operands.q.shape[1], operands.k.shape[1]
    vmem = VMEM_BYTES - (DQ_BYTES if operation == "flash_attention_bwd" else 0)
    blocks = {
        (balanced(queries, block_q), balanced(keys, block_k))
        for block_q, block_k in itertools.product(BLOCK_Q, BLOCK_K)
    }
    return [
        (block_q, block_k)
        for block_q, block_k in sorted(blocks)
        if max(queries / block_q, keys / block_k) < 1 << BLOCK_BITS - 1
        and scalar_bytes(operands, block_q, block_k) <= SMEM_BYTES
        and vmem_bytes(operation, operands, block_q, block_k) <= vmem
        and tile_bundles(operation, operands, target, block_q, block_k) <= TILE_BUNDLES
    ]


def stages(operation: str, target: Target) -> int:
    """The number of chunks of a tile in its software pipeline.

    The forward is limited by the vector unit, the more so the larger the matrix unit is, and gains from having more
    logits ready; backward and tangent are limited by the matrix unit.
    """
    if operation != "flash_attention":
        return 2
    return 4 if matrix_width(target) > LANES else 3


def matrix_width(target: Target) -> int:
    """The rows and columns of a matrix unit: up to v5 a core has four of 128, from v6 on (the default) two of 256."""
    old = target.device_kind and re.match(r"TPU v[2-5]\b", target.device_kind)
    return 128 if old else 256


def tile_bundles(operation: str, operands: Operands, target: Target, block_q: int, block_k: int) -> float:
    """The number of bundles for which a tile occupies the matrix units of a core.

    Four units of 128² do 2¹⁶ multiply-adds per bundle. Two of 256² could do four times as many, as they take two rows
    at once, but half of each is idle in products over 128 features.
    """
    features = (_lanes(operands.q) + _lanes(operands.v)) / 2
    rate = 2**16 if matrix_width(target) == LANES else 2**17
    passes = FLOAT32_PASSES if operands.q.dtype.itemsize == 4 else 1
    return PRODUCTS[operation] * passes * features * block_q * block_k / rate


def vmem_bytes(operation: str, operands: Operands, block_q: int, block_k: int) -> int:
    """Bytes of vector memory of a tile: blocks with double buffers, sums, and logits."""
    d, e, size = _lanes(operands.q), _lanes(operands.v), operands.q.dtype.itemsize
    queries, keys = block_q * (d + e), block_k * (d + e)  # q with o or do; k with v
    copied, sums = {
        "flash_attention": (queries + keys, block_q * e),
        "flash_attention_bwd": (queries + 2 * keys, keys),
        "flash_attention_jvp": (2 * (queries + keys), 2 * block_q * e),
    }[operation]
    pairs = [x for x in (operands.bias, operands.mask) if x is not None and x.shape[2] > 1 and x.shape[3] > 1]
    per_logit = 4 + sum(4 * x.dtype.itemsize for x in pairs)  # a bias has a tangent or a gradient as well
    return 2 * size * copied + 4 * sums + per_logit * block_q * block_k


def scalar_bytes(operands: Operands, block_q: int, block_k: int) -> int:
    """Bytes of scalar memory of a call: the table of tiles, at most all of them, scale, and sinks."""
    batch, queries, heads, _ = operands.q.shape
    tiles = math.ceil(queries / block_q) * math.ceil(operands.k.shape[1] / block_k)
    varying = any(
        x is not None and x.shape[0] > 1 for x in (operands.q_segment_ids, operands.mask, operands.cu_seqlens_q)
    )
    scalars = sum(x is not None for x in (operands.sinks, operands.softmax_scale)) * batch * heads
    return 4 * (tiles * (batch if varying else 1) + scalars)


def _tiles(
    operation: str, operands: Operands, spec: FlashAttentionSpec, blocks: tuple[int, int]
) -> tuple[int, float, float]:
    """The tiles of a head that causality and window leave, and, in whole tiles, their work and the program's code.

    The work counts only the chunks that are computed; the code is that for all tile masks.
    """
    block_q, block_k = blocks
    chunk = {"chunk": forward_chunk(operands)} if operation == "flash_attention" else {}
    problem = plan(operands, spec, KernelConfig(block_q=block_q, block_k=block_k), **chunk)
    mask_info = mask_info_of(Operands(operands.q, operands.k, operands.v), problem)
    written = np.array([mask.last - mask.first for mask in mask_info.tile_masks]) * problem.chunk / block_k
    computed = written[mask_info.block_mask]
    return int((computed > 0).sum()), computed.sum(), written.sum()


def _lanes(x) -> int:
    return round_up(x.shape[3], LANES)
