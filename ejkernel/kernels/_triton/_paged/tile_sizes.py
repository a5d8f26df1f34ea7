"""Tile sizes of attention over a cache in Triton, by the rows of a step, its features and its dtype."""

from collections.abc import Sequence
from typing import Any, NamedTuple

SMALLEST_TILE, LARGEST_DECODE_TILE = 16, 64


class TileConfig(NamedTuple):
    """The config of a launch: rows (tokens × heads of a group) and keys of a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# (keys, warps, stages) of a decode, the likeliest first; its rows follow from the step.
DECODE_SIZES = (
    (128, 4, 5),
    (64, 2, 5),
    (128, 4, 3),
    (64, 4, 3),
    (64, 2, 3),
    (32, 4, 5),
    (32, 4, 3),
    (16, 4, 2),
    (16, 4, 1),
)
PREFILL_SIZES = (
    TileConfig(128, 128, 8, 3),
    TileConfig(128, 64, 8, 3),
    TileConfig(64, 64, 4, 2),
    TileConfig(64, 32, 4, 2),
    TileConfig(64, 16, 4, 1),
)
PREFILL_SIZES_OF_MANY_HEADS = (*PREFILL_SIZES[:2], TileConfig(128, 32, 8, 2), TileConfig(128, 16, 8, 1))
# Larger tiles of 64 rows spill registers: with pages of eight bits, or beside drafts, those of more than 128 features;
# where the kernel converts e4m3 itself, which it gets as uint8, those of 128 too.
LARGE_DECODE_SIZES = ((64, 8, 3), (32, 8, 5), (32, 8, 3), (16, 8, 1))
# Tensor cores do not multiply float32: a tile may have few rows, and a thread has the rows and columns of its products
# in registers, with all that they sum over; of larger tiles, or of fewer warps, most are spilled.
DECODE_SIZES_OF_FLOAT32 = ((64, 4, 3), (64, 8, 3), (32, 8, 2), (16, 8, 2), (16, 8, 1))
PREFILL_SIZES_OF_FLOAT32 = tuple(TileConfig(64, *size) for size in ((32, 16, 2), (16, 16, 2), (16, 16, 1)))


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class Shapes(NamedTuple):
    """Shapes and dtypes of a call, as `launch.Step` has the arrays, and its sequences.

    Attributes:
        q, k, v: queries [b,t,h,d], keys and values [·,p,s,g,…,·].
        sequences: of a batch index.
        tokens: of a sequence, for which the tile of a decode has rows, as far as they fit.
        tables: whether block tables name the pages.
        drafts: whether a mask says which drafts a token sees.
    """

    q: Any
    k: Any
    v: Any
    sequences: int
    tokens: int = 1
    tables: bool = True
    drafts: bool = False


def decode_sizes(x: Shapes) -> Sequence[tuple[int, int, int]]:
    """Keys, warps and stages of a decode, the likeliest first."""
    rows = decode_rows(x)
    if not _is_float32(x):
        is_large = (x.drafts or x.k.dtype.itemsize == 1) and rows * _widest(x) >= 64 * (128 if _is_uint8(x) else 256)
        return LARGE_DECODE_SIZES if is_large else DECODE_SIZES
    return [size for size in DECODE_SIZES_OF_FLOAT32 if _is_in_registers(x, rows, *size[:2])]


def prefill_sizes(x: Shapes) -> Sequence[TileConfig]:
    """Tiles of a prefill, the likeliest first."""
    if not _is_float32(x):
        sizes = PREFILL_SIZES if heads_of_group(x) <= LARGEST_DECODE_TILE else PREFILL_SIZES_OF_MANY_HEADS
        return sizes[2:] if _is_uint8(x) else sizes
    return [of for of in PREFILL_SIZES_OF_FLOAT32 if _is_in_registers(x, of.rows, of.keys, of.warps)]


def _is_in_registers(x: Shapes, rows: int, keys: int, warps: int) -> bool:
    """Whether the operands of products of float32 stay in registers, by what ptxas spills.

    Up to 4 rows are those of one thread; with more than 16 there are more warps for them. Drafts have a loop of their
    own, and ptxas keeps operands of both.
    """
    if x.drafts and rows > 16 and keys > 16:
        return False
    return min(max(rows, 4), 16) * keys * _widest(x) <= 8192 * min(warps, 8)


def decode_tiles(x: Shapes, keys: int, warps: int, stages: int) -> TileConfig:
    """Tiles of a decode, with warps enough for their rows."""
    rows = decode_rows(x)
    return TileConfig(rows, keys, max(warps, rows // _rows_of_a_warp(x)), stages)


def decode_rows(x: Shapes) -> int:
    """Rows of a tile for the heads of a group and the tokens of a sequence."""
    heads = heads_of_group(x)
    least = 1 if _is_float32(x) else SMALLEST_TILE
    return max(least, power_of_two(heads), min(LARGEST_DECODE_TILE, power_of_two(heads * x.tokens)))


def heads_of_group(x: Shapes) -> int:
    """The query heads that share a key/value head."""
    return x.q.shape[2] // x.k.shape[3]


def keys_of_drafts(x: Shapes) -> int:
    """Keys of a tile of drafts at most, beside a loop over the cached keys: larger tiles spill registers."""
    return 32 if _widest(x) <= 128 else 16


def sizes_of_drafts(x: Shapes, cores: int | None) -> Sequence[TileConfig]:
    """Tiles of a launch that has drafts alone: of few rows where all of these run at once, two on each multiprocessor.

    Of 4 × 512 tokens of 32/8 heads of 128 features, 128 rows took 88 µs on an H200 with 32 keys and 112 with 64, and 64
    rows 151 with 64 keys; of 8 × 64 tokens 64 rows took 12 µs with 32 keys, and 128 rows 18 with 64.
    """
    many, few = (TileConfig(128, 32, 8, 4), TileConfig(128, 16, 8, 1)), (TileConfig(64, 32, 4, 4), PREFILL_SIZES[-1])
    batch, tokens, heads, _ = x.q.shape
    if heads_of_group(x) > LARGEST_DECODE_TILE:
        return many
    at_once = cores is not None and batch * tokens * heads <= 2 * 64 * cores
    return few if at_once else (*many, *few)


def most_heads(x: Shapes) -> int:
    """The most query heads of a group, which are rows of one tile; larger ones spill registers."""
    is_one_tile = _is_float32(x) or _is_uint8(x) or _widest(x) > 128
    return LARGEST_DECODE_TILE if is_one_tile else 2 * LARGEST_DECODE_TILE


def width(x: Any) -> int:
    """Features of a tile."""
    return max(SMALLEST_TILE, power_of_two(x.shape[-1]))


def _rows_of_a_warp(x: Shapes) -> int:
    """The most rows for which a warp has registers."""
    return 4 if _is_float32(x) else 16


def _widest(x: Shapes) -> int:
    return max(width(x.k), width(x.v))


def _is_float32(x: Shapes) -> bool:
    return x.q.dtype.itemsize == 4


def _is_uint8(x: Shapes) -> bool:
    return x.k.dtype == "uint8"
