"""Which configs the kernels of flash_attention are run with: blocks of keys, and how many of them are in flight.

The forward and the tangent hold block_q queries, 64 for each warpgroup that computes, and stream blocks of keys; the
backward holds block_k keys, 64 where there are 256 features, and streams blocks of queries. Shared memory has room for
num_stages of the blocks that stream by.

A forward with algorithm "e4m3" rounds q, k, v and the weights to eight bits (quantized.py): that is for a user to ask.
"""

from collections.abc import Sequence

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

# Queries of a sequence whose causal mask is a small part of the work.
LONG = 4096
# (block_q, block_k, num_stages) by D + V, the likeliest first.
CONFIGS = {
    "flash_attention": {
        128: ((192, 128, 4), (192, 128, 2), (128, 128, 4)),
        256: ((128, 128, 2), (128, 64, 4)),
        320: ((128, 128, 2),),
        512: ((128, 64, 2),),
    },
    "flash_attention_bwd": {
        128: ((128, 128, 2), (64, 128, 3)),
        256: ((64, 128, 2),),
        320: ((64, 128, 2),),
        512: ((64, 64, 2),),
    },
    "flash_attention_jvp": {
        128: ((128, 64, 4), (128, 64, 2)),
        256: ((128, 64, 2),),
        320: ((128, 32, 2),),
        512: ((128, 32, 1),),
    },
}


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    del target
    features = operands.q.shape[3] + operands.v.shape[3]
    by_features = CONFIGS[operation]
    candidates = by_features[next(size for size in by_features if features <= size)]
    most = _most_queries(operation, operands, spec)
    # Under a causal mask four stages of 192 queries had 391 to 402 TFLOP/s at 4k where two had 410 to 421.
    candidates = sorted(candidates, key=lambda blocks: (blocks[0] > most, spec.causal and blocks == (192, 128, 4)))
    return [
        KernelConfig(
            block_q=block_q,
            block_k=block_k,
            num_warps=12 if operation == "flash_attention_bwd" else 4 * (block_q // 64 + 1),
            num_stages=stages,
            platform=Platform.PALLAS,
            backend=Backend.GPU,
        )
        for block_q, block_k, stages in candidates
    ]


def check(operation: str, config: KernelConfig, block_q: Sequence[int], block_k: Sequence[int]) -> None:
    """Refuses blocks that a kernel is not made for, and more stages than there are named barriers for."""
    for name, taken in (("block_q", block_q), ("block_k", block_k), ("num_stages", (1, 2, 3, 4))):
        if (value := getattr(config, name)) not in taken:
            told = " or ".join(map(str, taken))
            raise ValueError(f"{operation}: config.{name} is {value}; the Mosaic GPU kernel takes {told}")


def _most_queries(operation: str, operands: Operands, spec: FlashAttentionSpec) -> int:
    """The largest block of queries for which registers suffice, beside masks and what a softcap leaves to remember.

    Where only the first block of a tile has a mask, it is worth while to spill there if more blocks follow.
    """
    segmented = operands.q_segment_ids is not None
    if operation == "flash_attention_bwd":
        return 64 if segmented or spec.softcap is not None else 128
    if segmented or spec.window[0] is not None or operands.cu_seqlens_q is not None:
        return 128
    return 128 if spec.causal and operands.q.shape[1] < LONG else 192
