"""Which configs the kernels of flash_attention are run with: blocks that fit vector memory.

Blocks are rows of queries by columns of keys; both are cut down to the sequence. `num_stages` cuts a block of keys into
the parts that flow through the pipeline of the vector and matrix units.
"""

import math

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

# (block_q, block_k, num_stages) by the wider of the two feature sizes, the likeliest first.
CONFIGS = {
    "flash_attention": {128: ((1024, 1024, 2), (512, 1024, 2), (512, 512, 2)), 256: ((512, 512, 2), (256, 512, 2))},
    "flash_attention_bwd": {128: ((512, 512, 2), (512, 256, 2), (256, 256, 2)), 256: ((256, 256, 2), (128, 256, 2))},
    "flash_attention_jvp": {128: ((512, 512, 2), (256, 512, 2), (256, 256, 2)), 256: ((256, 256, 2), (128, 256, 2))},
}


def heuristic(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> KernelConfig:
    """The config for a call (arrays or shapes) that was not tuned."""
    return space(operation, operands, spec, target)[0]


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    del spec, target
    width = 256 if max(operands.q.shape[3], operands.v.shape[3]) > 128 else 128
    return [
        KernelConfig(block_q=block_q, block_k=block_k, num_stages=stages, platform=Platform.PALLAS, backend=Backend.TPU)
        for block_q, block_k, stages in CONFIGS[operation][width]
    ]


def scalar_bytes(spec: FlashAttentionSpec, operands: Operands, target: Target) -> int:
    """Bytes of scalar memory of a call with the smallest blocks of the spaces: the table of tiles, scale, sinks."""
    del spec, target
    batch, queries, heads, _ = operands.q.shape
    smallest = min(min(config[:2]) for by_width in CONFIGS.values() for of in by_width.values() for config in of)
    tiles = math.ceil(queries / smallest) * math.ceil(operands.k.shape[1] / smallest)
    varying = any(x is not None and x.shape[0] > 1 for x in (operands.q_segment_ids, operands.mask))
    scalars = sum(x is not None for x in (operands.sinks, operands.softmax_scale)) * batch * heads
    return 4 * (tiles * (batch if varying else 1) + scalars)
