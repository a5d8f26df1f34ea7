"""Attention over a paged or dense cache in Triton: supported calls, shared memory, and the number of splits.

Triton and jax-triton are imported only when a kernel is first needed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Backend, OperationConfig, Platform, Target
from ejkernel.types.target import DEFAULT_CORE_COUNT

from .tile_sizes import (
    LARGEST_DECODE_TILE,
    SMALLEST_TILE,
    Shapes,
    TileConfig,
    decode_sizes,
    decode_tiles,
    heads_of_group,
    most_heads,
    power_of_two,
    prefill_sizes,
    sizes_of_drafts,
    width,
)

Config = TypeVar("Config", bound=OperationConfig)

LARGEST_WIDTH = 256
# Resident programs of the decoding kernels: as many as their registers allow, one for each warp scheduler. Pairs of
# eight bits need fewer: 64 × 2048 keys of 8 heads took 70 µs with four programs resident on an H200, 88 with three.
MOST_RESIDENT_WARPS, MOST_OF_PAIRS, FEWEST_RESIDENT_WARPS = 12, 16, 4
# Of a program that converts keys of eight bits: two cannot hide the conversions behind the copies.
FEWEST_CONVERTING_WARPS = 4
# Bytes of keys and values in flight on a multiprocessor that saturate the bandwidth.
_SATURATING_BYTES = 100 * 1024
# The cost of the start and end of a program, and of a second launch that merges splits, in keys read in that time.
_STARTUP_KEYS, _MERGE_KEYS = 128, 200
# Keys of a split at least.
LEAST_KEYS = 128
# Keys of a split whose size the batch does not decide.
KEYS_OF_INVARIANT_SPLIT = 1024


def refusal(target: Target, x: Shapes) -> str | None:
    """Why the kernels do not take a call on a target, or None."""
    if wrong := _launch.refusal(target) or _launch.dtype_refusal("q", x.q):
        return wrong
    x = as_read(x, target)
    if 0 in (*x.q.shape, *x.k.shape, *x.v.shape):
        return "no tokens, heads, features or slots"
    if (features := max(x.k.shape[-1], x.v.shape[-1])) > LARGEST_WIDTH:
        return f"{features} features; the kernels take up to {LARGEST_WIDTH}"
    if (heads := heads_of_group(x)) > (most := most_heads(x)):
        of = f"of {features} features in {x.q.dtype}"
        return f"{heads} query heads share a key/value head; the kernels take up to {most} {of}"
    smallest = max(shared_memory(x, tiles) for tiles in (decode_tiles(x, *decode_sizes(x)[-1]), prefill_sizes(x)[-1]))
    return _launch.memory_refusal(smallest, target)


def as_read(x: Shapes, target: Target) -> Shapes:
    """With the dtype in which kernels get keys and values."""
    of = lambda a: jax.ShapeDtypeStruct(a.shape, _launch.dtype_of_cache(a.dtype, target))
    return x._replace(k=of(x.k), v=of(x.v))


def shared_memory(x: Shapes, tiles: TileConfig) -> int:
    """Bytes of shared memory: keys and values in flight, one of each being multiplied, the queries, and the weights.

    Weights of few keys are there twice, as they change from the layout of one product to that of the other.
    """
    d, e = width(x.k), width(x.v)
    in_registers = x.k.dtype == x.q.dtype or are_pairs(x, tiles)
    converted = 0 if in_registers else tiles.keys * (d + e) * x.q.dtype.itemsize
    numbers = 4 * tiles.keys * ((tiles.stages - 1) // 2) if _has_page_numbers(x, tiles) else 0
    weights = tiles.keys * (2 if tiles.keys <= 32 else 1)
    return bytes_in_flight(x, tiles) + converted + numbers + tiles.rows * (d + weights) * x.q.dtype.itemsize


def are_pairs(x: Shapes, tiles: TileConfig) -> bool:
    """Whether keys and values are read in pairs of features: of eight bits, beside queries of sixteen."""
    widths = (x.k.shape[-1], x.v.shape[-1])
    powers_of_two = all(n >= 2 * SMALLEST_TILE and n == power_of_two(n) for n in widths)
    eight_bits = x.k.dtype.itemsize == 1 and x.q.dtype.itemsize == 2
    return eight_bits and powers_of_two and tiles.rows <= LARGEST_DECODE_TILE


def bytes_in_flight(x: Shapes, tiles: TileConfig) -> int:
    """Bytes of keys and values that the pipeline of a program has in flight.

    Where a tile has several pages every other stage is for their numbers, and holds no keys; products of warpgroups,
    which have 64 rows, keep one more, unless the number of a page is loaded with each tile.
    """
    buffers = tiles.stages - 1
    if _has_page_numbers(x, tiles):
        buffers = max(1, buffers // 2) + (tiles.rows >= 64)
    elif not _reads_tables(x):
        buffers += tiles.rows >= 64
    return max(1, buffers) * tiles.keys * (width(x.k) + width(x.v)) * x.k.dtype.itemsize


def _has_page_numbers(x: Shapes, tiles: TileConfig) -> bool:
    """Whether the pipeline loads several page numbers for a tile."""
    return _reads_tables(x) and x.k.shape[2] % tiles.keys != 0


def _reads_tables(x: Shapes) -> bool:
    """Whether keys wait for page numbers. Of a pool of one page they do not, as every number is clamped to that."""
    return x.tables and x.k.shape[1] > 1


def prefill_tiles(x: Shapes) -> TileConfig:
    """The first tiles of a prefill that fit the GPU that what is traced is for."""
    x = as_read(x, gpu_target())
    return _fitting(x, prefill_sizes(x))


def tiles_of_drafts(x: Shapes, batch_invariant: bool) -> TileConfig:
    """The same of a launch that has drafts alone."""
    return _fitting(x, sizes_of_drafts(x, None if batch_invariant else gpu_target().core_count))


def _fitting(x: Shapes, sizes: Sequence[TileConfig]) -> TileConfig:
    limit = _launch.shared_memory_limit(gpu_target())
    return next(tiles for tiles in sizes if shared_memory(x, tiles) <= limit)


def choices(spec: CacheSpec, target: Target, x: Shapes, keys: int) -> list[tuple[TileConfig, int]]:
    """Tiles and splits that may be best for sequences of up to so many keys, the likeliest first."""
    limit, cores = _launch.shared_memory_limit(target), target.core_count or DEFAULT_CORE_COUNT
    x = as_read(x, target)
    programs = x.q.shape[0] * x.sequences * x.k.shape[3]
    fit = [of for size in decode_sizes(x) if shared_memory(x, of := decode_tiles(x, *size)) <= limit]
    fit = [of for of in fit if _resident(x, of, limit) * of.warps >= FEWEST_RESIDENT_WARPS] or fit
    if x.k.dtype.itemsize < x.q.dtype.itemsize:
        fit = [of for of in fit if of.warps >= FEWEST_CONVERTING_WARPS] or fit
    found = {}
    for order, tiles in enumerate(fit[:4]):
        resident = _resident(x, tiles, limit)
        saturating = max(1, _SATURATING_BYTES / bytes_in_flight(x, tiles))
        in_tiles = math.ceil(keys / tiles.keys)
        for splits in _splits(spec, in_tiles, tiles, most=min(resident * cores, math.ceil(keys / LEAST_KEYS))):
            of_split = math.ceil(in_tiles / splits) * tiles.keys
            time = _time(programs * splits, of_split, resident, saturating, cores)
            merge = _MERGE_KEYS + splits if splits > 1 else 0
            found[tiles, splits] = (time + merge) * (1 + order / 100)
    return sorted(found, key=found.get)[:8]


def _resident(x: Shapes, tiles: TileConfig, limit: int) -> int:
    """Programs that are resident on a multiprocessor at once."""
    most = MOST_OF_PAIRS if are_pairs(x, tiles) else MOST_RESIDENT_WARPS
    return max(1, min(most // tiles.warps, limit // shared_memory(x, tiles)))


def _splits(spec: CacheSpec, in_tiles: int, tiles: TileConfig, most: int) -> Sequence[int]:
    """Into how many splits the tiles of a sequence may be cut."""
    if spec.num_splits is not None:
        return [spec.num_splits]
    if spec.batch_invariant:
        return [max(1, math.ceil(in_tiles * tiles.keys / KEYS_OF_INVARIANT_SPLIT))]
    return range(1, max(1, min(in_tiles, most)) + 1)


def _time(programs: int, keys: int, resident: int, saturating: float, cores: int) -> float:
    """The modelled time of programs with so many keys each, in units of a key read at full bandwidth.

    A multiprocessor runs waves of `resident` programs, the last of which has fewer; fewer than `saturating` programs
    do not use the whole bandwidth. The start and end of a wave cost a fixed number of keys.
    """
    waves, rest = divmod(programs, resident * cores)
    time = waves * resident * max(1, saturating / resident) * keys
    if rest:
        time += max(math.ceil(rest / cores), saturating) * keys
    return time + math.ceil(programs / (cores * resident)) * _STARTUP_KEYS


def excess(x: Shapes, tiles: TileConfig) -> str | None:
    """What the kernels have against tiles for these operands where the environment limits shared memory, or None."""
    limit, needed = _launch.limit_of_environment(), shared_memory(x, tiles)
    if limit is None or needed <= limit:
        return None
    return f"the config takes up to {needed} bytes of shared memory, {_launch.LIMIT_VARIABLE} allows {limit}"


def limited_by(excess: Callable[[Any, Any], str | None]) -> Callable[[Callable], Callable]:
    """Attaches `excess(operands, config)`, by which a config that does not fit is passed over."""

    def attach(implementation: Callable) -> Callable:
        implementation.excess = excess
        return implementation

    return attach


def check(operation: str, wrong: str | None) -> None:
    """Raises a ValueError that names the operation where something is wrong."""
    if wrong:
        raise ValueError(f"{operation} (triton): {wrong}")


def configs(of: type[Config], choices: Sequence[tuple[TileConfig, int]]) -> list[Config]:
    """The configs of an operation's class that ask for these tiles and splits."""
    return [
        of(
            keys_per_block=tiles.keys,
            num_splits=splits,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for tiles, splits in choices
    ]


def tiles_of(x: Shapes, config: Any) -> TileConfig:
    """The tiles of a decode that a config of one of the operations asks for."""
    return decode_tiles(x, config.keys_per_block, config.num_warps, config.num_stages)


def refuses(config: Any) -> str | None:
    """What the kernels have against a config of one of the operations, or None."""
    keys, warps = config.keys_per_block, config.num_warps
    if keys < SMALLEST_TILE or keys & (keys - 1):
        return f"config.keys_per_block is {keys}; Triton needs a power of two of at least {SMALLEST_TILE}"
    if warps not in (1, 2, 4, 8, 16, 32):
        return f"config.num_warps is {warps}; Triton needs a power of two of at most 32"
    return None
