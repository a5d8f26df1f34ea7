"""Attention over a cache quantised by TurboQuant in Triton: supported calls, tile sizes, and the number of splits.

Triton and jax-triton are imported only when a kernel is first needed.
"""

import math
from typing import Any

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch, _paged
from ejkernel.kernels._triton._paged import TileConfig, power_of_two
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

SMALLEST_TILE, LARGEST_WIDTH = 16, 256
# Rows of a tile: what tensor cores take at least, as columns beside keys; from how many on keys are the columns. These
# are the most that registers hold; half as many with more than WIDE features, and half of them in float32.
LEAST_ROWS, ROWS_OF_WARPGROUP, WIDE = 8, 64, 128
# Rows of a decode, if its tokens have to share them.
MOST_ROWS_OF_TOKENS = 16
# (keys, warps, stages) of a decode, the likeliest first. A warp alone waits for no other. Indices become entries in
# registers, so few warps are resident: with 16 keys as many again as with more.
SIZES = {
    8: ((16, 1, 5), (64, 1, 3), (32, 2, 3), (16, 1, 2)),
    16: ((32, 2, 3), (16, 1, 4), (16, 2, 2)),
    32: ((32, 2, 3), (16, 2, 2)),
    64: ((32, 4, 2), (16, 4, 1)),
}
WIDE_SIZES = {
    8: ((32, 2, 3), (64, 4, 3), (16, 2, 2)),
    16: ((32, 2, 3), (32, 4, 3), (16, 2, 2)),
    32: ((32, 4, 3), (16, 4, 2)),
}
# By mma.sync a warp alone spills where it has more rows than the fewest in float32, too.
SIZES_OF_FLOAT32, WIDE_SIZES_OF_FLOAT32 = ((16, 1, 3), (32, 2, 2), (16, 2, 1)), ((16, 2, 2), (16, 2, 1))
# Keys of a split at least, splits at most (beside its kernel one sequence of 64k took 40 µs with 256 on an H200, and 21
# with 128), and tiles that are timed.
LEAST_KEYS, MOST_SPLITS, WORTH_TIMING = 128, 128, 3
# Warps that are resident on a multiprocessor at once, with the smallest tile and with others.
RESIDENT_WARPS_OF_SMALLEST, RESIDENT_WARPS = 16, 8


def supports(spec: CacheSpec, x: Any, target: Target) -> str | None:
    """Why the kernel does not take the operands of one of the operations (arrays or shapes), or None."""
    del spec
    wrong = _launch.refusal(target) or _launch.dtype_refusal("q", x.q)
    for name in ("key_norms_pages", "value_norms_pages"):
        wrong = wrong or _launch.dtype_refusal(name, getattr(x, name))
    if wrong:
        return wrong
    if 0 in (*x.q.shape, *x.value_norms_pages.shape, *x.block_tables.shape):
        return "no tokens, heads, slots or sequences"
    features, rows, heads = x.q.shape[3], x.qjl_projection.shape[1], _heads(x)
    if features % 4 or features > LARGEST_WIDTH:
        return f"q has {features} features; the kernel takes multiples of 4 up to {LARGEST_WIDTH}"
    if rows > LARGEST_WIDTH:
        return f"qjl_projection has {rows} rows; the kernel takes up to {LARGEST_WIDTH}"
    if heads > (most := _most_rows(x)):
        what = f"of {features} features in {x.q.dtype}"
        return f"{heads} query heads share a key/value head; the kernel takes up to {most} {what}"
    return _launch.memory_refusal(shared_memory(x, _decodes(x)[-1], target.platform == "cuda"), target)


def shared_memory(x: Any, tiles: TileConfig, ptx: bool) -> int:
    """An upper bound of the bytes of shared memory: bytes of the cache in flight, and what is multiplied.

    In float32, whose products are of parts, operands are there twice. Otherwise entries and signs are made where they
    are multiplied, by PTX; but those for warpgroups pass through memory, and so do signs unless a warp has 16 or 64
    keys.
    """
    size, widths = x.q.dtype.itemsize, _widths(x)
    in_flight = max(1, tiles.stages - 1) * tiles.keys * (widths[0] + widths[1] // 8 + 16)
    queries, weights = tiles.rows * sum(widths) * size, tiles.rows * tiles.keys * size
    if _is_single(x):
        return in_flight + 2 * queries + weights + 2 * tiles.keys * widths[0] * size
    if not ptx:
        return in_flight + queries + weights + max(32, tiles.keys) * (2 * widths[0] + widths[1]) * size
    entries = tiles.keys * widths[0] * size if tiles.rows >= ROWS_OF_WARPGROUP else 0
    signs = 0 if tiles.keys in (16 * tiles.warps, 64 * tiles.warps) else tiles.keys * widths[1] * size
    return in_flight + queries + weights + entries + signs


def tiles_of(x: Any, config: RaggedPageAttentionConfig) -> TileConfig:
    """The tiles of a decode that a config asks for."""
    return TileConfig(_rows(x), config.keys_per_block, config.num_warps, config.num_stages)


def keys_are_rows(tiles: TileConfig) -> bool:
    """Whether a tile of logits has keys as rows, and queries as columns."""
    return tiles.rows < ROWS_OF_WARPGROUP


def prefill_tiles(x: Any) -> TileConfig:
    """The first tiles of a prefill that fit the shared memory of the GPU that what is traced is for."""
    return _fitting(x, _prefills(x), gpu_target())[0]


def space(spec: CacheSpec, x: Any, target: Target) -> list[RaggedPageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    first, *others = _fitting(x, _decodes(x), target)[:WORTH_TIMING]
    # The smallest tile is the fastest with as many programs as it may have: one sequence of 64k took 91 µs with half of
    # them on an H200, and with larger tiles 74.
    if others and _is_smallest(x, first) and not _fills(x, first, target) and _fills(x, others[0], target):
        first, others[0] = others[0], first
    found = [(tiles, splits) for tiles in (first, *others) for splits in _splits(x, tiles, target)]
    return _paged.configs(RaggedPageAttentionConfig, found)


def _splits(x: Any, tiles: TileConfig, target: Target) -> list[int]:
    """So many that all programs are resident at once, as near as can be; and twice and half as many."""
    most = max(1, min(MOST_SPLITS, x.block_tables.shape[2] * x.value_norms_pages.shape[2] // LEAST_KEYS))
    likely = min(most, max(1, _resident(x, tiles, target) // _units(x)))
    return list(dict.fromkeys((likely, min(most, 2 * likely), max(1, likely // 2))))


def _fills(x: Any, tiles: TileConfig, target: Target) -> bool:
    """Whether nearly as many programs are resident as can be, with the likeliest number of splits."""
    return 4 * _splits(x, tiles, target)[0] * _units(x) >= 3 * _resident(x, tiles, target)


def _units(x: Any) -> int:
    """Programs without splits: one for each sequence and head of the cache."""
    return x.q.shape[0] * x.block_tables.shape[1] * x.value_norms_pages.shape[3]


def _resident(x: Any, tiles: TileConfig, target: Target) -> int:
    """Programs that are resident at once."""
    warps = RESIDENT_WARPS_OF_SMALLEST if _is_smallest(x, tiles) else RESIDENT_WARPS
    return max(1, warps // tiles.warps) * (target.core_count or DEFAULT_CORE_COUNT)


def _is_smallest(x: Any, tiles: TileConfig) -> bool:
    """Whether a tile needs half the registers of others."""
    return tiles.rows == LEAST_ROWS and tiles.keys == SMALLEST_TILE and not (_is_single(x) or _is_wide(x))


def excess(x: Any, config: RaggedPageAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    limit, needed = _launch.limit_of_environment(), shared_memory(x, tiles_of(x, config), _launch.has_ptx())
    if limit is None or needed <= limit:
        return None
    return f"the config takes up to {needed} bytes of shared memory, {_launch.LIMIT_VARIABLE} allows {limit}"


def _fitting(x: Any, tiles: tuple[TileConfig, ...], target: Target) -> list[TileConfig]:
    """Those that fit the shared memory of a target, or the smallest."""
    limit, ptx = _launch.shared_memory_limit(target), target.platform == "cuda"
    return [of for of in tiles if shared_memory(x, of, ptx) <= limit] or [tiles[-1]]


def _decodes(x: Any) -> tuple[TileConfig, ...]:
    """Tiles of sequences with few tokens."""
    return tuple(TileConfig(_rows(x), *size) for size in _sizes(x, _rows(x)))


def _prefills(x: Any) -> tuple[TileConfig, ...]:
    """Tiles of other sequences, of which the last takes no more memory than a decode."""
    rows = max(MOST_ROWS_OF_TOKENS, _rows(x)) if _is_single(x) else _most_rows(x)
    return (*(TileConfig(rows, *size) for size in _sizes(x, rows)), _decodes(x)[-1])


def _sizes(x: Any, rows: int) -> tuple[tuple[int, int, int], ...]:
    if _is_single(x):
        return WIDE_SIZES_OF_FLOAT32 if _is_wide(x) or rows > LEAST_ROWS else SIZES_OF_FLOAT32
    return (WIDE_SIZES if _is_wide(x) else SIZES)[rows]


def _most_rows(x: Any) -> int:
    """Rows that a tile may have."""
    return ROWS_OF_WARPGROUP // 2 ** (_is_single(x) + _is_wide(x))


def _rows(x: Any) -> int:
    """Rows for the heads of a group, and for the tokens of an average sequence as far as they fit."""
    heads, tokens = _heads(x), math.ceil(x.q.shape[1] / x.block_tables.shape[1])
    tokens = tokens if power_of_two(heads * tokens) <= MOST_ROWS_OF_TOKENS else 1
    return max(LEAST_ROWS, power_of_two(heads * tokens))


def _heads(x: Any) -> int:
    """The query heads of a group."""
    return x.q.shape[2] // x.value_norms_pages.shape[3]


def _widths(x: Any) -> tuple[int, int]:
    """The features of a tile, and rows of the projection: four features a word, eight rows a byte."""
    of = lambda size, each: each * max(SMALLEST_TILE, power_of_two(math.ceil(size / each)))
    return of(x.q.shape[3], 4), of(x.qjl_projection.shape[1], 8)


def _is_single(x: Any) -> bool:
    return x.q.dtype.itemsize == 4


def _is_wide(x: Any) -> bool:
    return max(_widths(x)) > WIDE
