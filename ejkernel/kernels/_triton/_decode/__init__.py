"""Decoding in Triton, one query of each sequence over a paged cache: what its kernel takes, and its configs.

What stands here imports neither Triton nor jax-triton; the kernel is imported when it is first needed.
"""

import math
from collections.abc import Callable
from typing import Any

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target
from ejkernel.types.page_attention import PageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

LARGEST_WIDTH, MOST_ROWS = 256, 64
# Programs of a step for each multiprocessor, of which several run at once. On an H200 with 32 × 4096, 8 × 32768 and
# 128 × 8192 keys two to eight are as fast, and more cost the merging of their parts.
_PROGRAMS_PER_CORE = 5
# Keys that a part has at least, so that merging costs little beside it, and of one that the batch does not decide.
_LEAST_KEYS, _KEYS_OF_INVARIANT_PART = 256, 1024
# (keys of a tile, warps, stages), the likeliest first.
_SIZES = ((64, 2, 3), (128, 4, 2), (64, 4, 3), (128, 8, 3), (32, 4, 4), (32, 2, 3), (16, 4, 2), (16, 4, 1))


def refusal(spec: CacheSpec, target: Target, q: Any, k: Any, v: Any) -> str | None:
    """Why the kernel does not take queries [m,b,h,d] and a cache [·,·,·,g,·] on a target, or None."""
    if reason := _launch.refusal(target):
        return reason
    if q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if k.dtype.name == "float8_e4m3fn" and (target.platform != "cuda" or target.compute_capability < 89):
        return f"float8_e4m3fn is read from compute capability 8.9 on, not on {target} of {target.capability}"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "no sequences, heads, features or slots"
    if (width := max(k.shape[4], v.shape[4])) > LARGEST_WIDTH:
        return f"{width} features; the kernel takes up to {LARGEST_WIDTH}"
    if (rows := q.shape[2] // k.shape[3]) > MOST_ROWS:
        return f"{rows} query heads share a key/value head; the kernel takes up to {MOST_ROWS}"
    return _launch.memory_refusal(shared_memory(q, k, v, *_SIZES[-1]), target)


def space(spec: CacheSpec, target: Target, q: Any, k: Any, v: Any, keys: int) -> list[PageAttentionConfig]:
    """Configs that may be best for sequences of up to so many keys, the likeliest first."""
    limit = _launch.shared_memory_limit(target)
    sizes = [size for size in _SIZES if shared_memory(q, k, v, *size) <= limit][:4]
    return [
        PageAttentionConfig(
            keys_per_block=block,
            num_splits=splits,
            num_warps=warps,
            num_stages=stages,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for block, warps, stages in sizes
        for splits in _splits(spec, target, q, k, keys)
    ]


def _splits(spec: CacheSpec, target: Target, q: Any, k: Any, keys: int) -> list[int]:
    """Into how many parts to cut: what is asked for; the same in every step, where a batch must not decide it."""
    if spec.num_splits is not None:
        return [spec.num_splits]
    if spec.batch_invariant:
        return [math.ceil(keys / _KEYS_OF_INVARIANT_PART)]
    programs, most = q.shape[0] * q.shape[1] * k.shape[3], max(1, keys // _LEAST_KEYS)
    wanted = _PROGRAMS_PER_CORE * (target.core_count or DEFAULT_CORE_COUNT) / programs
    likely = min(most, max(1, math.ceil(wanted)))
    return list(dict.fromkeys([likely, min(most, 2 * likely), max(1, likely // 2)]))


def shared_memory(q: Any, k: Any, v: Any, keys: int, warps: int, stages: int) -> int:
    """Bytes of the tiles of keys and values in flight, of one of each as it is multiplied, and of the queries."""
    del warps
    width = lambda n: max(16, 1 << (n - 1).bit_length())
    d, e, rows = width(k.shape[4]), width(v.shape[4]), max(16, 1 << (q.shape[2] // k.shape[3] - 1).bit_length())
    converted = 0 if k.dtype == q.dtype else keys * (d + e) * q.dtype.itemsize
    return stages * keys * (d + e) * k.dtype.itemsize + converted + rows * (d + keys) * q.dtype.itemsize


def excess(q: Any, k: Any, v: Any, config: PageAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    limit = _launch.limit_of_environment()
    needed = shared_memory(q, k, v, config.keys_per_block, config.num_warps, config.num_stages)
    if limit is None or needed <= limit:
        return None
    return f"the config takes up to {needed} bytes of shared memory, {_launch.LIMIT_VARIABLE} allows {limit}"


def limited_by(excess: Callable[[Any, PageAttentionConfig], str | None]) -> Callable[[Callable], Callable]:
    """Attaches `excess(operands, config)`, by which a config that does not fit is passed over."""

    def attach(implementation: Callable) -> Callable:
        implementation.excess = excess
        return implementation

    return attach


def refuses(config: PageAttentionConfig) -> str | None:
    """What the kernel has against a config, or None."""
    wrong = _launch.refuses("decode_kernel", of_launch(config))
    return wrong and wrong.replace("block_k", "keys_per_block")


def of_launch(config: PageAttentionConfig) -> KernelConfig:
    """What a launch is told."""
    return KernelConfig(block_k=config.keys_per_block, num_warps=config.num_warps, num_stages=config.num_stages)
