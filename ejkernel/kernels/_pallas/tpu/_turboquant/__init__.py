"""Attention over pages quantised by TurboQuant on TPU: which calls the Pallas kernels take, and their configs.

A page with a multiple of 128 slots is stored by XLA with its slots in lanes, whatever the order of the axes: it pads
nothing so. The kernels take pools as they are stored then. Smaller pages have the pages of the pool in lanes, from
which none can be copied, and XLA would rewrite the pool before every call.
"""

import math
from typing import Any

from ejkernel.kernels._pallas.tpu import SUBLANES
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._paged import (
    BLOCK_BYTES,
    KEYS,
    LANES,
    TOKENS,
    VECTOR_MEMORY,
    WORTH_TIMING,
    rows_of_tile,
    table_refusal,
)

# Features of a row of words: a byte has two indices, a word four bytes, and a register eight rows of words.
FEATURES = 8 * SUBLANES
# Numbers of bfloat16 that are summed for a query, and for an entry of a key: they have the bits of float32, as lse has.
PARTS = 3
# Bytes of a block of keys and values for which a copy takes long compared with its latency.
LIKELY_BYTES = 2**20
# The most rows of a tile for a head, and the most logits of a block for it: code for them is unrolled.
MOST_ROWS_OF_TILE, MOST_LOGITS = 256, 2**16


def supports(spec: CacheSpec, x: Any, target: Target) -> str | None:
    """Why the kernels do not take the operands of one of the operations (arrays or shapes), or None."""
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if x.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {x.q.dtype}; the kernel takes bfloat16, float16 and float32"
    for name in ("key_norms_pages", "value_norms_pages"):
        if (dtype := getattr(x, name).dtype).name not in ("bfloat16", "float32"):
            return f"{name} are {dtype}; the kernel takes bfloat16 and float32"
    if 0 in x.q.shape:
        return "no tokens, heads or features"
    return _layout_refusal(x) or _size_refusal(spec, x)


def _layout_refusal(x: Any) -> str | None:
    """Why pools of these shapes cannot be copied from where they are, or None."""
    page, features, rows = x.value_norms_pages.shape[2], x.q.shape[3], 8 * x.key_signs_pages.shape[4]
    if page % LANES:
        return f"pages of {page} slots; the kernel takes multiples of {LANES}, as XLA would rewrite the pool for others"
    if features % FEATURES or features // 2 >= LANES:
        return f"{features} features; the kernel takes multiples of {FEATURES} below {2 * LANES}"
    if rows not in (32, 64, 128) and (rows % 256 or rows // 8 >= LANES):
        return f"{rows} rows of qjl_projection; the kernel takes 32, 64, 128, 256, 512 and 768"
    return None


def _size_refusal(spec: CacheSpec, x: Any) -> str | None:
    """Why vector or scalar memory cannot hold a tile and its blocks, or the tables, or None."""
    (b, t, _, _), (_, n, columns) = x.q.shape, x.block_tables.shape
    if not (found := sizes(spec, x)):
        return VECTOR_MEMORY
    least = min(tokens for tokens, _ in found)
    return table_refusal(b * (t if least == 1 else n + -(-t // least)), b * n * columns)


def space(spec: CacheSpec, x: Any, target: Target) -> list[RaggedPageAttentionConfig]:
    """The configs worth measuring, the most promising first."""
    del target
    of = lambda tokens, pages: RaggedPageAttentionConfig(tokens, pages, platform=Platform.PALLAS, backend=Backend.TPU)
    return [of(*found) for found in sizes(spec, x)]


def sizes(spec: CacheSpec, x: Any) -> list[tuple[int, int]]:
    """Pairs (tokens of a tile, pages of a block) worth measuring for a step, the most promising first."""
    t, page, group = x.q.shape[1], x.value_norms_pages.shape[2], x.q.shape[2] // x.value_norms_pages.shape[3]
    alone = spec.batch_invariant or t <= x.context_lens.shape[1]
    tiles = [1] if alone else [n for n in TOKENS if n == min(TOKENS) or n * group <= MOST_ROWS_OF_TILE]
    most = x.block_tables.shape[2] * page
    blocks = dict.fromkeys(max(1, min(keys, most) // page) for keys in KEYS)
    found = [
        (tokens, pages)
        for tokens in tiles
        for pages in sorted(blocks, key=lambda pages: abs(math.log2(pages * page * bytes_of_key(x) / LIKELY_BYTES)))
        if pages == 1 or rows_of_tile(tokens, group) * pages * page <= MOST_LOGITS
        if vector_bytes(x, rows_of_tile(tokens, group), pages * page) <= BLOCK_BYTES
    ]
    return found[:WORTH_TIMING]


def bytes_of_key(x: Any) -> int:
    """The bytes of one key and its value in vector memory, for all heads; of 8 bits a register has 32 rows."""
    heads, norm = x.value_norms_pages.shape[3], x.key_norms_pages.dtype.itemsize
    padded = sum(-(-pool.shape[4] // 32) * 32 for pool in (x.key_indices_pages, x.key_signs_pages))
    return heads * (padded + x.value_indices_pages.shape[4] + 4 * norm)


def vector_bytes(x: Any, rows: int, keys: int) -> int:
    """Bytes of vector memory: two blocks of keys, query tiles and results with double buffers, sums, and logits."""
    heads, count = x.value_norms_pages.shape[3], parts_of_values(x.q.dtype)
    of_keys, of_values = (-(-n * x.q.shape[3] // LANES) * LANES for n in (PARTS, count))
    signs = -(-8 * x.key_signs_pages.shape[4] // LANES) * LANES
    tiles = 2 * heads * rows * (2 * PARTS * (of_keys + signs) + 4 * of_values + 4 * LANES)
    sums = 4 * heads * rows * (2 * LANES + of_values)
    in_registers = 4 * rows * keys * (2 + count) + 2 * LANES * (of_keys + signs + of_values)
    return 2 * keys * bytes_of_key(x) + 4 * heads * keys + tiles + sums + in_registers


def parts_of_values(dtype: Any) -> int:
    """How many numbers of bfloat16 are summed for a weight, and for an entry of a value, in results of this dtype."""
    return 2 if dtype.name == "bfloat16" else PARTS
