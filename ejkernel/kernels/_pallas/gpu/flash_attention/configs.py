"""Which configs the kernels of flash_attention are run with: blocks of keys, and how many of them are in flight.

A tile has 128 queries, 64 for each of two warpgroups. (block_k, num_stages), the likeliest first, by D + V: both of
a block of keys lie in shared memory, and its logits in registers beside the accumulator.
"""

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

CONFIGS = {"flash_attention": {128: ((128, 4), (128, 2)), 256: ((128, 2), (64, 4)), 320: ((128, 2),), 512: ((64, 2),)}}
WARPS = {"flash_attention": 12}


def heuristic(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> KernelConfig:
    """The config for a call (arrays or shapes) that was not tuned."""
    return space(operation, operands, spec, target)[0]


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    del spec, target
    features = operands.q.shape[3] + operands.v.shape[3]
    by_features = CONFIGS[operation]
    candidates = by_features[next(size for size in by_features if features <= size)]
    return [
        KernelConfig(
            block_q=128,
            block_k=block_k,
            num_warps=WARPS[operation],
            num_stages=stages,
            platform=Platform.PALLAS,
            backend=Backend.GPU,
        )
        for block_k, stages in candidates
    ]
