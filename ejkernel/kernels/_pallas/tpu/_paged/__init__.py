"""Attention over a paged or dense cache on TPU: which calls the Pallas kernel supports, and its configs.

Pallas is imported only when a kernel is first needed.
"""

import math
from collections.abc import Sequence
from typing import Any

from ejkernel.kernels._pallas.tpu import MOST_ROWS, SMEM_BYTES, SUBLANES
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Target

from .work import WorkItem

LANES = 128
QUANTISED = ("float8_e4m3fn", "int8")
# The most slots of a copy: of larger pages only the pieces that are needed are copied.
MOST_SLOTS_OF_PIECE = 128
# Vector memory for blocks, tiles and logits together: a program has 56 MiB, of which the compiler needs some for
# register spills.
BLOCK_BYTES = 40 * 2**20
# Bytes of a block of keys and values for which a copy takes long compared with its latency, on all generations.
LIKELY_BYTES = 2 * 2**20
KEYS = (512, 1024, 256, 2048, 128)
# The candidates for the tokens of a tile of prefill, and the most rows that they may give a head.
TOKENS = (128, 64, 32, 16, 8, 4)
MOST_ROWS_OF_TILE = 512
WORTH_TIMING = 3
VECTOR_MEMORY = "a tile and two blocks of keys take more than vector memory holds"


def refusal(spec: CacheSpec, target: Target, q: Any, caches: Sequence[tuple[Any, int]], page: int) -> str | None:
    """Why the kernel cannot run on queries [..., d] and caches, given with the rows of a slot, or None."""
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {q.dtype}; the kernel takes bfloat16, float16 and float32"
    if 0 in q.shape or any(0 in cache.shape for cache, _ in caches):
        return "no tokens, heads, features or slots"
    if page % SUBLANES:
        return f"pages of {page} slots; the kernel takes multiples of {SUBLANES}"
    for cache, rows in caches:
        if cache.dtype.name == "float16" and is_by_rows(rows, features := cache.shape[-1], cache.dtype):
            return f"a slot has {rows} rows of {features} float16, which Mosaic does not have: XLA would copy the cache"
    if spec.num_splits is not None and spec.num_splits > 1:
        return f"num_splits is {spec.num_splits}; the kernel does not split the keys of a sequence"
    return None


def is_by_rows(rows: int, features: int, dtype: Any) -> bool:
    """Whether the kernel takes a cache with the slots of a row side by side, rather than the rows of a slot."""
    fills = rows % SUBLANES == 0 or (rows in (2, 4) and rows * dtype.itemsize % 4 == 0)
    return not fills or (features > LANES and features % LANES > 0)


def bytes_of_number(q: Any) -> int:
    """Bytes of a number in products with the queries: the matrix unit takes bfloat16, and float32 for all others."""
    return 2 if q.dtype.name == "bfloat16" else 4


def has_slots(scale: Any) -> bool:
    """Whether a scale [b?,p?,s?,g?] differs between slots."""
    return scale is not None and (scale.shape[1] > 1 or scale.shape[2] > 1)


def table_refusal(items: int, table: int) -> str | None:
    """Why scalar memory cannot hold `items` work items and `table` entries of block tables, or None."""
    if (size := 4 * (len(WorkItem._fields) * items + table)) > SMEM_BYTES:
        return f"work items and block tables take {size} bytes; scalar memory holds {SMEM_BYTES}"
    return None


def ragged_refusal(spec: CacheSpec, target: Target, x: Any, q: Any, pages: Any, latent: int = 0) -> str | None:
    """Why the kernels cannot run a step with the tables x, queries q [b,t,h,d] and pages [b?,p,s,…,d], or None."""
    (b, t, _, _), (_, n, columns) = q.shape, x.block_tables.shape
    if reason := refusal(spec, target, q, _of_pool(pages), pages.shape[2]):
        return reason
    if not (sizes := ragged_sizes(spec, x, q, pages, latent)):
        return VECTOR_MEMORY
    least = min(tokens for tokens, _ in sizes)
    return table_refusal(b * (t if least == 1 else n + -(-t // least)), b * n * columns)


def ragged_sizes(spec: CacheSpec, x: Any, q: Any, pages: Any, latent: int = 0) -> list[tuple[int, int]]:
    """Pairs (tokens of a tile, pages of a block) worth measuring for a step, the most promising first.

    With `batch_invariant` every token has its own tile, and sizes do not depend on the step.
    """
    t, page, group = q.shape[1], pages.shape[2], q.shape[2] // _heads(_of_pool(pages), latent)
    alone = spec.batch_invariant or t <= x.context_lens.shape[1]
    sizes = (
        [1] if alone else [tokens for tokens in TOKENS if tokens == min(TOKENS) or tokens * group <= MOST_ROWS_OF_TILE]
    )
    most = x.block_tables.shape[2] * page
    scales = [getattr(x, name, None) for name in ("k_scale", "v_scale")]
    return [
        (tokens, keys // page)
        for tokens in sizes
        for keys in keys_of_blocks(q, _of_pool(pages), rows_of_tile(tokens, group), page, most, latent, scales)
    ][:WORTH_TIMING]


def _of_pool(pages: Any) -> list[tuple[Any, int]]:
    """The single cache of a pool: alternating keys and values, or latents, which have no axis of heads."""
    return [(pages, math.prod(pages.shape[3:-1]))]


def keys_of_blocks(
    q: Any,
    caches: Sequence[tuple[Any, int]],
    rows: int,
    unit: int,
    most: int,
    latent: int = 0,
    scales: Sequence[Any] = (),
) -> list[int]:
    """The keys per block worth measuring for tiles of `rows` rows: multiples of `unit`, the most promising first.

    A sequence has at most `most` keys. The list is empty if not even `unit` keys fit into vector memory.
    """
    sizes = dict.fromkeys(max(1, min(keys, most) // unit) * unit for keys in KEYS)
    of_scales = sum(map(has_slots, scales)) * bytes_of_scale(_heads(caches, latent), rows, piece_of(unit))
    taken = lambda keys: vector_bytes(q, caches, rows, keys, latent) + keys * of_scales
    fitting = [keys for keys in sizes if taken(keys) <= BLOCK_BYTES]
    likely = LIKELY_BYTES / bytes_of_key(caches)
    return sorted(fitting, key=lambda keys: abs(math.log2(max(keys, 1) / likely)))[:WORTH_TIMING]


def bytes_of_key(caches: Sequence[tuple[Any, int]]) -> int:
    """The bytes of one key and its value in vector memory, for all heads."""
    return sum(rows * _lanes(cache.shape[-1]) * cache.dtype.itemsize for cache, rows in caches)


def bytes_of_scale(heads: int, rows: int, piece: int) -> int:
    """Bytes of vector memory, for each key of a block, of scales that differ between slots.

    Two blocks in pieces of whole registers, the same by heads, and weights of `rows` rows times scales.
    """
    padded = -(-heads // SUBLANES) * SUBLANES
    return 4 * (2 * padded * LANES // piece + padded + SUBLANES * heads + 3 * rows)


def vector_bytes(q: Any, caches: Sequence[tuple[Any, int]], rows: int, keys: int, latent: int = 0) -> int:
    """Bytes of vector memory: two blocks of keys, query tiles and results with double buffers, sums, and logits.

    With `latent`, that many of the first features of a key are its value.
    """
    heads, d, e = _heads(caches, latent), _lanes(caches[0][0].shape[-1]), _lanes(latent or caches[-1][0].shape[-1])
    tiles = 2 * heads * rows * (bytes_of_number(q) * (d + e) + 4 * LANES)
    sums = 4 * heads * rows * (2 * LANES + e)
    by_heads = heads * keys * (d if latent else d + e) * bytes_of_number(q)
    return 2 * keys * bytes_of_key(caches) + by_heads + tiles + sums + 3 * 4 * rows * keys


def _heads(caches: Sequence[tuple[Any, int]], latent: int) -> int:
    """The key/value heads: half the rows of a slot in a cache of alternating keys and values."""
    return caches[0][1] // (2 if len(caches) == 1 and not latent else 1)


def rows_of_tile(tokens: int, group: int) -> int:
    """The rows of a tile for each key/value head: `group` per token, rounded up to whole registers."""
    return -(-tokens * group // SUBLANES) * SUBLANES


def piece_of(slots: int) -> int:
    """The slots of a copy: the largest multiple of 8 that divides a page, up to MOST_SLOTS_OF_PIECE."""
    return max(n for n in range(SUBLANES, min(slots, MOST_SLOTS_OF_PIECE) + 1, SUBLANES) if slots % n == 0)


def refuses(config: Any) -> str | None:
    """Why the kernel cannot run with a config, or None."""
    for name in ("keys_per_block", "pages_per_block", "queries_per_block"):
        if (size := getattr(config, name, 1)) > MOST_ROWS:
            return f"config.{name} is {size}; the TPU kernel computes at most {MOST_ROWS} at once"
    return None


def _lanes(features: int) -> int:
    return -(-features // LANES) * LANES
