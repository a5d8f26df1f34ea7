"""The configs of flash_attention on Hopper: block sizes and pipeline stages, by heuristics and for the tuner.

In the forward and the tangent block_q queries are stationary, 64 for each consumer warpgroup, and blocks of block_k
keys are streamed; in the backward block_k keys are stationary, 64 where k and v have more than 320 features together,
and blocks of block_q queries are streamed. num_stages is the number of streamed blocks in shared memory; in the tangent
of more than 128 features k, v and their tangents are streamed one after the other, and a stage holds any of these.

The forward in e4m3 (quantized.py) has larger blocks of keys, as a number takes half of the memory.
"""

import math
from collections.abc import Sequence

import jax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target
from ejkernel.types.target import DEFAULT_CORE_COUNT

from .head_dims import cut_row, tile_width

# The head dims of q and v for which there is a forward in e4m3.
FEATURES = ((64, 64), (128, 128), (192, 128), (256, 256))
# Up to this head dim of v the tangent holds q in registers, and streams k and v at once.
MOST_BESIDE_Q = 128
# (block_q, block_k, num_stages) of the forward with a bias, of which a stage has a tile, or with a mask: the last fits
# any head dims. With 128 keys, or with 192 queries in two stages, whose scheduler is persistent, a mask spills.
OF_PAIRS = ((192, 64, 3), (128, 64, 3), (128, 64, 2))
# Up to so many columns of v three consumers have the registers for blocks of 64 keys.
MOST_OF_THREE = 128
# Bytes of shared memory that a thread block may use.
SHARED_BYTES = 227 * 1024
# From this length on tiles of 192 queries pay, without and with a causal mask: the last tile of a sequence is seldom
# full, and a causal mask wastes more of a large tile. Up to MOST_OF_SHORT columns they pay without a mask for shorter
# sequences too, where they have no more rows than tiles of 128, and there is one for each multiprocessor.
LONG = {
    64: (1024, 4096),
    128: (1024, 4096),
    160: (1024, 4096),
    192: (1024, 4096),
    224: (1024, 2048),
    256: (4096, 8192),
    320: (4096, 8192),
}
MOST_OF_SHORT = 224
# From this number of keys on blocks of 96 are the first choice for 64 features: they spill, but outside of the loop.
LEAST_OF_96 = 2048
# (block_q, block_k, num_stages) by the columns of k and v beside one another (`_columns`), the likeliest first. A
# thread has registers for V / 2 sums, block_k / 2 logits and block_k / 4 for weights: 128 in all at most of the 160 of
# three consumers, 192 of the 232 of two.
CONFIGS = {
    "flash_attention": {
        64: ((192, 64, 4), (128, 128, 4), (192, 128, 2)),
        128: ((192, 96, 3), (192, 64, 4), (192, 64, 2), (128, 128, 4)),
        160: ((192, 64, 4), (192, 64, 3), (128, 128, 2)),
        192: ((192, 64, 4), (192, 96, 2), (128, 128, 2)),
        224: ((192, 64, 3), (192, 64, 2), (128, 128, 2)),
        256: ((192, 64, 2), (128, 128, 2)),
        320: ((128, 128, 2), (192, 64, 3), (128, 80, 2)),
        384: ((128, 64, 3), (128, 64, 2), (128, 96, 2), (128, 112, 2)),
        448: ((128, 96, 2), (128, 80, 2), (128, 64, 2)),
        512: ((128, 64, 2),),
    },
    "flash_attention in e4m3": {
        128: ((192, 128, 2), (192, 64, 2), (128, 128, 2)),
        256: ((192, 128, 2), (192, 64, 2), (128, 128, 2)),
        320: ((192, 128, 2), (192, 64, 2), (128, 128, 2)),
        512: ((128, 128, 2),),
    },
    "flash_attention_bwd": {
        128: ((128, 128, 2), (64, 128, 3)),
        192: ((64, 128, 3), (64, 128, 2)),
        256: ((64, 128, 2),),
        320: ((64, 128, 2),),
        384: ((64, 64, 2), (64, 64, 3)),
        512: ((64, 64, 2),),
    },
    "flash_attention_jvp": {
        128: ((128, 64, 4), (128, 64, 2)),
        192: ((128, 64, 3), (128, 64, 2)),
        320: ((128, 64, 2),),
        512: ((128, 64, 3),),
    },
}


def space(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    D, V = operands.q.shape[3], operands.v.shape[3]
    size = columns_of_keys(D, V) if operation == "flash_attention_bwd" else _columns(D, V)
    if operation == "flash_attention_jvp" and V > MOST_BESIDE_Q:
        size = max(CONFIGS[operation])
    most = _most_queries(operation, operands, spec, target)
    kernel = "flash_attention in e4m3" if operation == "flash_attention" and in_e4m3(operands, spec) else operation
    candidates = CONFIGS[kernel][next(key for key in CONFIGS[kernel] if size <= key)]
    if kernel == "flash_attention":
        if has_pairs(operands):
            candidates = [blocks for blocks in OF_PAIRS if blocks[0] == 128 or tile_width(V) <= MOST_OF_THREE]
        bias = operands.bias is not None
        candidates = [blocks for blocks in candidates if shared_bytes(blocks, D, V, bias=bias) <= SHARED_BYTES]
        taken = blocks_of_keys(V, has_pairs(operands))
        candidates = [blocks for blocks in candidates if blocks[1] in taken]
    if kernel == "flash_attention_bwd" and operands.bias is not None:
        candidates = _beside_bias(candidates, D, V)
    few_keys = operands.k.shape[1] < LEAST_OF_96 and size <= 128
    candidates = sorted(candidates, key=lambda blocks: (blocks[0] > most, few_keys and blocks[1] == 96))
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


def has_pairs(operands: Operands) -> bool:
    """Whether the call has a bias or a mask."""
    return operands.bias is not None or operands.mask is not None


def refuses_pairs(operands: Operands) -> str | None:
    """Why the forward does not take this bias and this mask, or None."""
    S, K = operands.q.shape[1], operands.k.shape[1]
    for name in ("bias", "mask"):
        x = getattr(operands, name)
        if x is None:
            continue
        if operands.cu_seqlens_q is not None:
            return f"{name} over packed sequences is not supported by these kernels"
        if x.shape[2:] != (S, K):
            return f"{name} is {list(x.shape)}; the kernels take one that varies over queries and keys"
    if operands.bias is not None and operands.bias.dtype.itemsize != 2:
        return f"bias is {operands.bias.dtype}; the kernels take 16 bits"
    if operands.bias is not None and K % 8:
        return f"a bias over {K} keys; TMA loads rows of multiples of 8"
    return None


def blocks_of_keys(V: int, pairs: bool = False) -> tuple[int, ...]:
    """The sizes of blocks of keys that the forward takes; with `pairs`, a bias or a mask, 64: where its keys end, TMA
    cuts off a tile of the bias of one row of 128 bytes, and of no more.

    A product with v sums over as many keys at a time as a row of v in shared memory has features, so a block has to be
    a multiple of that; the rows of a head dim that TMA cuts off (head_dims.py) have a fixed width.
    """
    if pairs:
        return (64,)
    return tuple(block_k for block_k in TAKES["flash_attention"]["block_k"] if V % 16 == 0 or not block_k % cut_row(V))


def in_e4m3(operands: Operands, spec: FlashAttentionSpec) -> bool:
    """Whether the forward rounds to e4m3. JAX before 0.11 cannot transpose tiles of eight bits in shared memory."""
    taken = (operands.q.shape[3], operands.v.shape[3]) in FEATURES and jax.__version_info__ >= (0, 11)
    return spec.precision == "e4m3" and taken and not has_pairs(operands)


def shared_bytes(
    blocks: tuple[int, int, int], D: int, V: int, persistent: bool = False, e4m3: bool = False, bias: bool = False
) -> int:
    """Bytes of shared memory of the forward: its tiles, of 16 bits a number or 8 in e4m3, and 2 KB of barriers.

    A stage has a tile of the bias, if there is one. With a persistent scheduler o has memory of its own beside q and
    the next q; otherwise o reuses that of q.
    """
    (block_q, block_k, stages), D, V = blocks, tile_width(D), tile_width(V)
    size = 1 if e4m3 else 2
    q, o, streamed = block_q * D * size, block_q * V * 2, stages * block_k * ((D + V) * size + bias * block_q * 2)
    return (2 * q + o if persistent else max(q, o)) + streamed + 2048


def bytes_of_backward(blocks: tuple[int, int, int], D: int, V: int, ds_stages: int, bias: bool) -> int:
    """The same of the backward: its tiles, its barriers, and up to 1 KB before them; p is there if keys are 64."""
    block_q, keys, stages = blocks
    streamed = 2 * columns_of_keys(D, V) + 8 + bias * 2 * keys
    ds_and_p, dq = 2 * (ds_stages * keys + (keys == 64) * 64), 4 * (D if D <= 128 else 64)
    tiles = keys * 2 * columns_of_keys(D, V) + block_q * (stages * streamed + ds_and_p + dq)
    return tiles + 8 * (1 + 2 * stages + ds_stages) + 1024


def _beside_bias(candidates: Sequence[tuple[int, int, int]], D: int, V: int) -> list[tuple[int, int, int]]:
    """The blocks of the backward that fit beside a bias: with two stages of ds if any do, else with one stage of q."""
    for ds_stages in (2, 1):
        of = (blocks for blocks in candidates if bytes_of_backward(blocks, D, V, ds_stages, True) <= SHARED_BYTES)
        if fit := list(of):
            return fit
    return [(64, candidates[0][1], 1)]


# What the kernels are made for; there are named barriers for so many stages.
TAKES = {
    "flash_attention": dict(block_q=(128, 192), block_k=(64, 80, 96, 112, 128), num_stages=(1, 2, 3, 4)),
    "flash_attention_bwd": dict(block_q=(64, 128), block_k=(64, 128), num_stages=(1, 2, 3, 4)),
    "flash_attention_jvp": dict(block_q=(128,), block_k=(64,), num_stages=(1, 2, 3, 4)),
}


def refuses(operation: str, config: KernelConfig, **narrower: Sequence[int]) -> str | None:
    """Why a kernel cannot run with a config, or None; `narrower` restricts the values of some fields for this call."""
    for name, taken in (TAKES[operation] | narrower).items():
        if (value := getattr(config, name)) not in taken:
            told = " or ".join(map(str, taken))
            return f"config.{name} is {value}; the Mosaic GPU kernel takes {told}"
    return None


def check(operation: str, config: KernelConfig, **narrower: Sequence[int]) -> None:
    """Raises a ValueError with the reason for which `refuses` rejects a config, if it does."""
    if wrong := refuses(operation, config, **narrower):
        raise ValueError(f"{operation}: {wrong}")


def columns_of_keys(D: int, V: int) -> int:
    """The columns of k and v together, as tiles of the backward have them."""
    return tile_width(D, even=True) + tile_width(V)


def _columns(D: int, V: int) -> int:
    """The columns of k and v together, where k counts at least as many as v: the accumulator of v is in registers."""
    return max(tile_width(D), tile_width(V)) + tile_width(V)


def _most_queries(operation: str, operands: Operands, spec: FlashAttentionSpec, target: Target) -> int:
    """The largest block of queries that pays; in the backward the largest that registers hold beside masks, softcap."""
    segmented = operands.q_segment_ids is not None
    if operation == "flash_attention_bwd":
        few = segmented or has_pairs(operands) or spec.softcap is not None
        return 64 if few else 128
    (B, S, H, D), V = operands.q.shape, operands.v.shape[3]
    if spec.window[0] is not None or (operands.bias is not None and operands.mask is not None):
        return 128
    long = next((LONG[size] for size in LONG if _columns(D, V) <= size), (0, 0))
    if segmented or operands.cu_seqlens_q is not None:
        return 192 if _columns(D, V) <= 128 and long[True] <= S else 128
    tiles = math.ceil(S / 192)
    fills = tiles * 192 <= math.ceil(S / 128) * 128 and B * H * tiles >= (target.core_count or DEFAULT_CORE_COUNT)
    if fills and not spec.causal and not spec.batch_invariant and _columns(D, V) <= MOST_OF_SHORT:
        return 192
    return 192 if long[spec.causal] <= S else 128
