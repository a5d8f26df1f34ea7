"""Attention over a cache in Triton, in pages or dense: what its kernels take, and how their work is divided.

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.types import Backend, OperationConfig, Platform, Target
from ejkernel.types.target import DEFAULT_CORE_COUNT

Config = TypeVar("Config", bound=OperationConfig)

SMALLEST_TILE, LARGEST_DECODE_TILE, LARGEST_WIDTH, MOST_HEADS = 16, 64, 256, 64
# Of the kernels of a decode, by their registers.
MOST_RESIDENT_WARPS = 12
# Keys of a split whose size the batch does not decide.
KEYS_OF_INVARIANT_SPLIT = 1024


class Tiles(NamedTuple):
    """Rows (tokens × heads of a group) and keys of a tile, warps and stages of the pipeline of a launch."""

    rows: int
    keys: int
    warps: int
    stages: int


# The likeliest first; of a decode's rows there are as many as a step needs.
DECODE_SIZES = tuple(
    Tiles(SMALLEST_TILE, *of)
    for of in ((64, 2, 3), (64, 4, 5), (128, 4, 3), (64, 4, 3), (32, 4, 5), (32, 2, 3), (16, 4, 2), (16, 4, 1))
)
PREFILL_SIZES = (Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 16, 4, 1))


def power_of_two(n: int) -> int:
    """The least that is at least n."""
    return 1 << (n - 1).bit_length()


class Shapes(NamedTuple):
    """Shapes and dtypes of a call: queries [b,t,h,d], keys and values [·,p,s,g,…,·], and whether tables name pages."""

    q: Any
    k: Any
    v: Any
    tables: bool = True


def refusal(spec: CacheSpec, target: Target, x: Shapes) -> str | None:
    """Why the kernels do not take a call on a target, or None."""
    if reason := _launch.refusal(target):
        return reason
    if x.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {x.q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if x.k.dtype.name == "float8_e4m3fn" and (target.platform != "cuda" or target.compute_capability < 89):
        return f"float8_e4m3fn is read from compute capability 8.9 on, not on {target} of {target.capability}"
    if 0 in (*x.q.shape, *x.k.shape, *x.v.shape):
        return "no tokens, heads, features or slots"
    if (width := max(x.k.shape[-1], x.v.shape[-1])) > LARGEST_WIDTH:
        return f"{width} features; the kernels take up to {LARGEST_WIDTH}"
    if (heads := x.q.shape[2] // x.k.shape[3]) > MOST_HEADS:
        return f"{heads} query heads share a key/value head; the kernels take up to {MOST_HEADS}"
    smallest = max(shared_memory(x, tiles) for tiles in (DECODE_SIZES[-1], PREFILL_SIZES[-1]))
    return _launch.memory_refusal(smallest, target)


def shared_memory(x: Shapes, tiles: Tiles) -> int:
    """Bytes of the tiles of keys and values in flight, of one of each as it is multiplied, and of the queries.

    Where a tile has several pages every other stage of the pipeline is for their numbers, and holds no keys.
    """
    width = lambda n: max(SMALLEST_TILE, power_of_two(n))
    d, e = width(x.k.shape[-1]), width(x.v.shape[-1])
    rows = max(tiles.rows, power_of_two(x.q.shape[2] // x.k.shape[3]))
    buffers = (tiles.stages - 1) // 2 if x.tables and x.k.shape[2] % tiles.keys else tiles.stages - 1
    converted = 0 if x.k.dtype == x.q.dtype else tiles.keys * (d + e) * x.q.dtype.itemsize
    queries = rows * (d + tiles.keys) * x.q.dtype.itemsize
    return max(1, buffers) * tiles.keys * (d + e) * x.k.dtype.itemsize + converted + queries


def fitting(sizes: Sequence[Tiles], x: Shapes) -> Tiles:
    """The first of the sizes whose tiles fit the shared memory of the GPU that what is traced is for."""
    limit = _launch.shared_memory_limit(gpu_target())
    return next(tiles for tiles in sizes if shared_memory(x, tiles) <= limit)


def decode_tokens(tokens: int, sequences: int, heads: int, batch_invariant: bool) -> tuple[int, int]:
    """Rows of a decode's tile, and tokens of a sequence that they have: those of an average sequence, if they fit.

    They are those of a single token where they may not depend on the step.
    """
    average = 1 if batch_invariant else math.ceil(tokens / sequences)
    rows = max(SMALLEST_TILE, power_of_two(heads), min(LARGEST_DECODE_TILE, power_of_two(heads * average)))
    return rows, rows // heads


def choices(spec: CacheSpec, target: Target, x: Shapes, sequences: int, keys: int) -> list[tuple[Tiles, int]]:
    """Tiles and splits that may be best for sequences of up to so many keys, the likeliest first."""
    limit = _launch.shared_memory_limit(target)
    programs = x.q.shape[0] * sequences * x.k.shape[3]
    found = []
    for tiles in [tiles for tiles in DECODE_SIZES if shared_memory(x, tiles) <= limit][:4]:
        resident = min(MOST_RESIDENT_WARPS // tiles.warps, max(1, limit // shared_memory(x, tiles)))
        slots = resident * (target.core_count or DEFAULT_CORE_COUNT)
        found += [(tiles, splits) for splits in _splits(spec, programs, slots, math.ceil(keys / tiles.keys), tiles)]
    return found


def _splits(spec: CacheSpec, programs: int, slots: int, tiles: int, sizes: Tiles) -> list[int]:
    """Into how many splits to cut the tiles of so many programs, of which `slots` run at once.

    The time, in tiles: waves of programs, each with its tiles and the time of one to begin and end, and one and a half
    for the launch that merges.
    """
    if spec.num_splits is not None:
        return [spec.num_splits]
    if spec.batch_invariant:
        return [max(1, math.ceil(tiles * sizes.keys / KEYS_OF_INVARIANT_SPLIT))]
    merge = lambda n: 0 if n == 1 else 1.5 + n / 64
    time = lambda n: math.ceil(programs * n / slots) * (math.ceil(tiles / n) + 1) + merge(n)
    ranked = sorted(range(1, min(tiles, slots) + 1), key=time) or [1]
    likely = ranked[0]
    return list(dict.fromkeys([likely, *(n for n in (2 * likely, likely // 2) if 1 <= n <= tiles)]))


def excess(x: Shapes, config: Any) -> str | None:
    """What the kernels have against a config for these operands where the environment limits shared memory, or None."""
    limit, needed = _launch.limit_of_environment(), shared_memory(x, tiles_of(config))
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


def configs(of: type[Config], choices: Sequence[tuple[Tiles, int]]) -> list[Config]:
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


def tiles_of(config: Any) -> Tiles:
    """The tiles of a decode that a config of one of the operations asks for."""
    return Tiles(SMALLEST_TILE, config.keys_per_block, config.num_warps, config.num_stages)


def refuses(config: Any) -> str | None:
    """What the kernels have against a config of one of the operations, or None."""
    keys, warps = config.keys_per_block, config.num_warps
    if keys < SMALLEST_TILE or keys & (keys - 1):
        return f"config.keys_per_block is {keys}; Triton needs a power of two of at least {SMALLEST_TILE}"
    if warps not in (1, 2, 4, 8, 16, 32):
        return f"config.num_warps is {warps}; Triton needs a power of two of at most 32"
    return None
