"""Which configs the kernels of flash_attention are run with: one by heuristics, and the space that tuning searches.

The candidates are listed by the wider of the two feature sizes, the one that was fastest on an H200 first. A mask, a
bias, dropout or packed sequences put indices and further tiles into registers: such calls have lists of their own. Of
a list those count that fit into the shared memory of the target.
"""

import numpy as np

from ejkernel.kernels._triton._launch import SHARED_MEMORY, limit_of_environment, shared_memory_limit
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .problem import is_key_mask, tiled

# (block_q, block_k, num_warps, num_stages). In the backward block_k is stationary and block_q streamed.
PLAIN = {
    "flash_attention": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3)),
        96: ((128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
        128: ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 2)),
        192: ((128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        256: ((128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)),
    },
    "flash_attention_bwd": {
        64: ((64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 2)),
        96: ((64, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
        128: ((64, 128, 8, 3), (32, 128, 8, 3), (64, 128, 8, 2), (32, 64, 4, 3), (32, 64, 4, 2)),
        192: ((32, 128, 8, 3), (32, 128, 8, 2), (16, 64, 4, 2)),
        256: ((64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1)),
    },
    "flash_attention_jvp": {
        64: ((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (64, 64, 4, 2)),
        96: ((128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2)),
        192: ((128, 32, 8, 2), (128, 16, 8, 2), (16, 16, 8, 1)),
        256: ((128, 32, 8, 2), (128, 16, 8, 3), (16, 32, 8, 1)),
    },
}
# Where a query sees few keys, many small programs fill the device better.
SHORT = 2048
SHORT_FORWARD = (64, 64, 4, 3)
# Where a block of keys is seen by few queries, smaller blocks of them hold fewer in vain.
FEW = 256
FEW_BACKWARD = (32, 64, 4, 3)
FURTHER = {
    "flash_attention": {
        64: ((128, 64, 8, 2), (64, 64, 4, 2)),
        128: ((128, 64, 8, 2), (64, 64, 8, 2)),
        192: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        256: ((128, 32, 8, 2), (64, 32, 8, 2)),
    },
    "flash_attention_bwd": {
        64: ((32, 128, 8, 2), (32, 64, 4, 2)),
        128: ((32, 128, 8, 2), (32, 64, 8, 2)),
        192: ((32, 64, 8, 2), (16, 64, 8, 2)),
        256: ((32, 64, 8, 2), (16, 64, 8, 2)),
    },
    "flash_attention_jvp": {
        64: ((128, 32, 8, 2), (64, 32, 4, 2)),
        128: ((128, 32, 8, 2), (64, 32, 8, 2)),
        192: ((128, 32, 8, 2), (128, 16, 8, 2)),
        256: ((128, 16, 8, 3), (128, 16, 8, 2)),
    },
}
# Two of those at once.
CROWDED = {
    "flash_attention": {64: ((128, 64, 8, 2), (64, 64, 4, 2)), 128: ((64, 32, 8, 2),), 256: ((64, 32, 8, 2),)},
    "flash_attention_bwd": {64: ((32, 64, 8, 2), (16, 64, 4, 2)), 128: ((32, 64, 8, 2),), 256: ((16, 64, 8, 1),)},
    "flash_attention_jvp": {64: ((64, 32, 8, 2),), 128: ((32, 16, 8, 1),), 256: ((16, 32, 8, 1),)},
}
# Packed sequences of that many features take a few registers more.
PACKED = {"flash_attention_bwd": {256: ((16, 64, 8, 1),)}, "flash_attention_jvp": {256: ((16, 32, 8, 1),)}}
# So do segments, windows, a bias of keys, and tokens that do not fill the last tile.
EDGED = {"flash_attention_jvp": {256: ((128, 16, 8, 3), (16, 16, 8, 1))}}
BIASED = {
    "flash_attention": {
        64: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)),
        128: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
    }
}
UNEVEN = {
    "flash_attention_bwd": {
        64: ((32, 64, 4, 3), (64, 64, 8, 3), (64, 64, 4, 2)),
        96: ((64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 2)),
        192: ((16, 128, 8, 2), (32, 64, 8, 3), (16, 64, 8, 2)),
    }
}
# Since Blackwell weights and gradients of logits go to shared memory, too.
BLACKWELL = {
    "flash_attention_bwd": {256: ((32, 64, 8, 2), (32, 64, 8, 1))},
    "flash_attention_jvp": {256: ((128, 16, 8, 2), (16, 32, 8, 1))},
}
# GPUs before Hopper, GeForce and those of AMD feed matrix products from registers, of which large tiles leave none.
FROM_REGISTERS = {
    "flash_attention": {
        64: ((64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        192: ((64, 32, 8, 2), (64, 32, 4, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    },
    "flash_attention_bwd": {
        64: ((32, 64, 4, 2), (32, 64, 8, 2)),
        96: ((32, 64, 4, 2), (32, 64, 8, 2)),
        128: ((64, 64, 4, 2), (32, 64, 8, 2), (16, 64, 8, 1)),
        160: ((16, 32, 4, 1),),
        192: ((32, 32, 4, 1),),
        256: ((32, 64, 8, 2), (16, 64, 8, 1)),
    },
    "flash_attention_jvp": {
        128: ((64, 32, 4, 2), (64, 32, 8, 1)),
        160: ((16, 32, 8, 1),),
        192: ((32, 32, 8, 1),),
        256: ((16, 32, 8, 1),),
    },
}
# The same of calls with dropout, a bias or mask of pairs, or two other things that put tiles or indices into registers.
CROWDED_FROM_REGISTERS = {
    "flash_attention": {
        64: ((64, 64, 4, 2), (64, 32, 4, 2)),
        128: ((64, 32, 4, 2),),
        192: ((32, 32, 8, 2),),
        256: ((64, 32, 8, 2), (64, 32, 8, 1)),
    },
    "flash_attention_bwd": {
        64: ((32, 64, 4, 2), (32, 64, 8, 2)),
        96: ((16, 64, 8, 1),),
        128: ((32, 64, 8, 2), (16, 64, 8, 1)),
        192: ((16, 32, 4, 1),),
        256: ((32, 32, 8, 1),),
    },
    "flash_attention_jvp": {64: ((32, 32, 4, 1),), 128: ((32, 32, 8, 1),), 256: ((16, 32, 8, 1),)},
}
FLOAT32 = {
    "flash_attention": {64: ((32, 32, 8, 2),), 128: ((32, 32, 8, 2),), 256: ((32, 32, 8, 1),)},
    "flash_attention_bwd": {
        64: ((32, 32, 8, 2),),
        128: ((32, 32, 8, 1),),
        192: ((16, 16, 4, 1),),
        256: ((16, 16, 8, 1),),
    },
    "flash_attention_jvp": {
        64: ((32, 32, 8, 2), (32, 32, 8, 1)),
        128: ((32, 32, 8, 1),),
        192: ((16, 16, 4, 1),),
        256: ((16, 16, 8, 1),),
    },
}

# Where the environment sets a limit into which none of a list fits.
SMALLEST = (16, 16, 4, 1)


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    candidates = _candidates(operation, operands, spec, target)
    limit = shared_memory_limit(target)
    # The last of a list fits its GPUs: on AMD's, less stands in shared memory than here is thought.
    last = candidates[-1] if limit_of_environment() is None else SMALLEST
    fitting = [c for c in candidates if tiles_memory(operation, operands, *c) <= limit] or [last]
    return [
        KernelConfig(
            block_q=block_q,
            block_k=block_k,
            num_warps=warps,
            num_stages=stages,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for block_q, block_k, warps, stages in fitting
    ]


def _candidates(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> tuple:
    features = max(tiled(operands.q.shape[3]), tiled(operands.v.shape[3]))
    pairs = (_of_pairs(operands.bias), _of_pairs(operands.mask))
    further = (*pairs, operands.cu_seqlens_q, operands.dropout)
    table = PLAIN if all(x is None for x in further) else FURTHER
    segmented = operands.q_segment_ids is not None or is_key_mask(operands)
    crowded = sum(x is not None for x in further) + segmented > 1
    if crowded:
        table = CROWDED
    if target.multiplies_from_registers:
        crowded |= any(x is not None for x in (*pairs, operands.dropout))
        table = CROWDED_FROM_REGISTERS if crowded else FROM_REGISTERS
    if operands.q.dtype == np.float32:
        table = FLOAT32
    width = min(width for width in table[operation] if width >= features)
    tables = *_special(table, segmented, operands, spec, target), table
    configs = next(of[operation][width] for of in tables if width in of.get(operation, {}))
    most_keys = visibility_of(operands, spec).most_keys
    if table is PLAIN and operation == "flash_attention" and most_keys <= SHORT and width < 256:
        return _first(SHORT_FORWARD, configs)
    if table is PLAIN and operation == "flash_attention_bwd" and most_keys <= FEW and width == 64:
        return _first(FEW_BACKWARD, configs)
    return configs


def _special(table: dict, segmented: bool, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[dict]:
    """What stands in for the lists of the table where it has the operation and width; the first counts."""
    if table is FURTHER and operands.cu_seqlens_q is not None:
        return [PACKED]
    if table is not PLAIN:
        return []
    biased = operands.bias is not None
    uneven = operands.q.shape[1] % 64 or operands.k.shape[1] % 64
    edged = segmented or spec.window[0] is not None or biased or uneven
    blackwell = (target.compute_capability or 0) >= 100
    conditions = ((uneven, UNEVEN), (biased, BIASED), (edged, EDGED), (blackwell, BLACKWELL))
    return [special for condition, special in conditions if condition]


def _first(config: tuple, configs: tuple) -> tuple:
    return (config, *(c for c in configs if c != config))


def _of_pairs(x):
    """A bias or mask that varies over queries; None for one that is the same for all, whose tiles are small."""
    return None if x is None or x.shape[2] == 1 else x


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """`tiles_memory` of a config."""
    sizes = (config.block_q, config.block_k, config.num_warps, config.num_stages)
    return tiles_memory(operation, operands, *sizes)


def tiles_memory(operation: str, operands: Operands, *sizes: int) -> int:
    """Bytes of the tiles that a program of (block_q, block_k, num_warps, num_stages) keeps in shared memory."""
    size = _staged(operation, operands, *sizes)
    if operation == "flash_attention_jvp" and values_wait(operands, *sizes):
        _, block_k, _, stages = sizes
        size -= 2 * (stages - 1) * block_k * tiled(operands.v.shape[3]) * np.dtype(operands.q.dtype).itemsize
    return size


def values_wait(operands: Operands, *sizes: int) -> bool:
    """Whether the pass of the tangent leaves tiles of v and v_dot in registers until their turn comes.

    It does where as many of them as of k and k_dot do not fit shared memory: it then holds one of each.
    """
    return _staged("flash_attention_jvp", operands, *sizes) > SHARED_MEMORY[90]


def _staged(operation: str, operands: Operands, block_q: int, block_k: int, warps: int, stages: int) -> int:
    """Bytes of the tiles where all that stream by are there num_stages times.

    With one stage, tiles of bias and mask are loaded into registers: one at a time is in shared memory, on its way to
    another layout.
    """
    D, V = tiled(operands.q.shape[3]), tiled(operands.v.shape[3])
    tiles, moved = stages * block_q * block_k, 1
    if operation == "flash_attention":
        elements = block_q * D + stages * block_k * (D + V)
    elif operation == "flash_attention_jvp":
        elements, moved = 2 * block_q * D + 2 * stages * block_k * (D + V), 2
    else:
        elements = (block_k + stages * block_q) * (D + V) + block_q * block_k
    of_bias = 0 if _of_pairs(operands.bias) is None else 4
    of_mask = 0 if _of_pairs(operands.mask) is None else 1
    pairs = max(of_bias, of_mask) if stages == 1 else of_bias * moved + of_mask
    return elements * np.dtype(operands.q.dtype).itemsize + pairs * tiles + 1024
