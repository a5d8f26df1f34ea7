"""The configs of the kernels of flash_attention: the heuristic choice, and the space that tuning searches.

Each table lists candidates by the wider of the two feature sizes, the fastest on an H200 first. A mask, a bias, dropout
or packed sequences need registers for indices and further tiles, so such calls have tables of their own. Candidates
that do not fit into the shared memory of the target are left out.
"""

from dataclasses import replace

import numpy as np

from ejkernel.kernels._triton._launch import SHARED_MEMORY, limit_of_environment, shared_memory_limit
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .problem import is_key_mask, tiled

# (block_q, block_k, num_warps, num_stages). In the backward it is the tile of dk and dv, which stream block_q queries.
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
# If a query sees at most SHORT keys, many small programs fill the device better.
SHORT = 2048
SHORT_FORWARD = (64, 64, 4, 3)
# If a query sees at most FEW keys, smaller blocks of queries waste less work on pairs outside of the band.
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
# Calls with two or more of mask, bias, dropout, packed sequences and segments.
CROWDED = {
    "flash_attention": {64: ((128, 64, 8, 2), (64, 64, 4, 2)), 128: ((64, 32, 8, 2),), 256: ((64, 32, 8, 2),)},
    "flash_attention_bwd": {64: ((32, 64, 8, 2), (16, 64, 4, 2)), 128: ((32, 64, 8, 2),), 256: ((16, 64, 8, 1),)},
    "flash_attention_jvp": {64: ((64, 32, 8, 2),), 128: ((32, 16, 8, 1),), 256: ((16, 32, 8, 1),)},
}
# With packed sequences, these kernels need a few registers more at 256 features.
PACKED = {"flash_attention_bwd": {256: ((16, 64, 8, 1),)}, "flash_attention_jvp": {256: ((16, 32, 8, 1),)}}
# So they do with segments, windows, a bias over keys, and lengths that are no multiple of a tile.
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
# From Blackwell on, weights and gradients of logits are operands in shared memory, too.
BLACKWELL = {
    "flash_attention_bwd": {256: ((32, 64, 8, 2), (32, 64, 8, 1))},
    "flash_attention_jvp": {256: ((128, 16, 8, 2), (16, 32, 8, 1))},
}
# On GPUs before Hopper, GeForce and AMD, operands of matrix products are in registers, which large tiles would exhaust.
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
# The same GPUs, for calls with dropout, a bias or mask over pairs, or two other operands that need registers.
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
    "flash_attention": {64: ((32, 32, 8, 2),), 128: ((32, 32, 8, 2),), 256: ((32, 16, 8, 1),)},
    "flash_attention_bwd": {
        64: ((32, 32, 8, 2),),
        128: ((32, 32, 8, 1),),
        192: ((16, 16, 4, 1),),
        256: ((16, 16, 8, 1),),
    },
    "flash_attention_jvp": {
        64: ((32, 32, 8, 2), (32, 32, 8, 1)),
        128: ((32, 16, 16, 1), (32, 16, 8, 1)),
        192: ((16, 16, 4, 1),),
        256: ((32, 16, 8, 1), (16, 16, 8, 1)),
    },
}

# The config used if the environment sets a limit of shared memory that no candidate fits.
SMALLEST = (16, 16, 4, 1)


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    candidates = _candidates(operation, operands, spec, target)
    limit = shared_memory_limit(target)
    # The last candidate fits all GPUs of its table: on AMD, less is kept in shared memory than `tiles_memory` says.
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
    """Tables with precedence over `table` for the operations and widths that they list, in order of precedence."""
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
    """The bias or mask if it varies over queries, else None: then its tiles are small."""
    return None if x is None or x.shape[2] == 1 else x


def transposed_tile(config: KernelConfig) -> KernelConfig:
    """The config of those kernels of a backward whose programs hold as many queries as those of dk and dv hold keys."""
    return replace(config, block_q=config.block_k, block_k=config.block_q)


def shared_memory(operation: str, operands: Operands, config: KernelConfig) -> int:
    """Bytes of shared memory that a program with this config needs for its tiles."""
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
    """Whether the tangent kernel loads the next tiles of v and v_dot into registers rather than into pipeline stages.

    It does if num_stages of them beside those of k and k_dot do not fit into shared memory, which then holds one of
    each.
    """
    return _staged("flash_attention_jvp", operands, *sizes) > SHARED_MEMORY[90]


def _staged(operation: str, operands: Operands, block_q: int, block_k: int, warps: int, stages: int) -> int:
    """Bytes of the tiles in shared memory if every streamed tile has num_stages buffers.

    With one stage, tiles of bias and mask are loaded into registers, and use shared memory one at a time for the
    conversion of their layout.
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
