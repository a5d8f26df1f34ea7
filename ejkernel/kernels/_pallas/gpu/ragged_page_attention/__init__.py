"""ragged_page_attention on Hopper GPUs: prefills by a Pallas kernel of Mosaic GPU, decodes by that or by Triton's.

Of few sequences the kernel of the prefills computes all, and of many the decodes with few keys, while memory would be
idle. Drafts of which a mask says who sees them are left to a launch of Triton, which continues the softmax.

Pallas is imported only when a kernel is first needed.
"""

import math
from dataclasses import replace
from typing import Any

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._target import gpu_target
from ejkernel.kernels._triton import _launch, _paged
from ejkernel.kernels._triton import ragged_page_attention as triton
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

from .._supports import refuses_scale, refuses_target

# Of head dims up to so many features: block_q, block_k and stages (flash_attention/configs.py). Sequences are seldom so
# long that 192 queries of them would pay.
BLOCKS = {64: (128, 128, 4), 128: (128, 128, 2), 192: (128, 64, 2), 256: (128, 64, 2)}
# The same for sequences whose rows fit in one warpgroup's. A tile of two warpgroups computes as much again for nothing,
# at a power that lowers the rate of the memory which bounds it: 16 × 8 tokens took 146 µs so on an H200, and 132 for as
# long as the GPU had not warmed up.
ONE_WARPGROUP = 64
BLOCKS_OF_FEW_ROWS = {128: (ONE_WARPGROUP, 128, 3), 192: (ONE_WARPGROUP, 64, 3), 256: (ONE_WARPGROUP, 64, 3)}
# Pages of eight bits are in shared memory beside what they are converted to.
BLOCKS_OF_EIGHT_BITS = {D: (block_q, block_k, 2) for D, (block_q, block_k, _) in BLOCKS.items()}
BLOCKS_OF_FEW_ROWS_OF_EIGHT_BITS = {D: (ONE_WARPGROUP, block_k, 2) for D, (_, block_k, _) in BLOCKS.items()}
# A page, or the part of it in a block of keys, is copied in tiles of 8 rows; fewer than 16 make too many copies.
SMALLEST_PAGE = 16
# Keys of a decode that is a work tile beside prefills, at most; longer ones are split by Triton.
MOST_KEYS_OF_TILE = 8192
# With fewer tokens, or sequences of fewer rows (tokens × heads of a group), most rows of a tile are empty.
LEAST_TOKENS, LEAST_ROWS = 64, 32
MOST_PACKED_HEADS = 16
"""Of a tile; a power of two, so that a warpgroup's rows are whole tokens."""


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    if wrong := refuses_target(target):
        return wrong
    q, kv = operands.q, operands.kv_pages
    if q.dtype.name not in ("bfloat16", "float16"):
        return f"q is {q.dtype}; the kernel takes bfloat16 and float16"
    if wrong := triton.supports(spec, operands, target):
        return wrong
    if wrong := next(filter(None, (_refuses_scales(name, operands) for name in ("k_scale", "v_scale"))), None):
        return wrong
    multiple = 64 if kv.dtype.itemsize == 1 else 16
    if q.shape[3] % multiple or q.shape[3] > max(BLOCKS):
        of_pages = f", of pages of {kv.dtype}" if kv.dtype.itemsize == 1 else ""
        return f"a head dim of {q.shape[3]}; the kernel takes multiples of {multiple} up to {max(BLOCKS)}{of_pages}"
    page, block_k = kv.shape[2], _of_head_dim(BLOCKS, operands)[1]
    if page % SMALLEST_PAGE or (page % block_k and block_k % page):
        whole = f"multiples of {SMALLEST_PAGE} that divide {block_k}, or multiples of that"
        return f"pages of {page} slots; the kernel takes {whole}"
    if wrong := refuses_scale(spec):
        return wrong
    if q.shape[1] < LEAST_TOKENS:
        return f"{q.shape[1]} tokens in the step; the kernel takes {LEAST_TOKENS} or more"
    if (rows := average_rows(operands)) < LEAST_ROWS:
        average = f"sequences of {rows} tokens × heads of a group on average"
        return f"{average}; below {LEAST_ROWS} Triton's decoding kernel is faster"
    return None


def _refuses_scales(name: str, operands: Operands) -> str | None:
    """Why the kernel does not take the scales of keys or values, or None."""
    scale, kv = getattr(operands, name), operands.kv_pages
    if not varies_over_slots(scale):
        return None
    if scale.shape != kv.shape[:4]:
        return f"{name} of slots is {list(scale.shape)}; the kernel takes those of the pages, {list(kv.shape[:4])}"
    if operands.q.dtype.name == "float16":
        return f"{name} of slots with q in float16, where values times their scales may overflow"
    return None if kv.dtype.itemsize == 1 else f"{name} of slots; the kernel takes them with pages of eight bits"


def varies_over_slots(scale: Any) -> bool:
    """Whether a scale [b?,p?,s?,g?] is not one for all pages, or for each head."""
    return scale is not None and tuple(scale.shape[1:3]) != (1, 1)


def _heads(operands: Operands) -> int:
    """Query heads that share a key/value head."""
    return operands.q.shape[2] // operands.kv_pages.shape[3]


def average_rows(operands: Operands) -> int:
    """Tokens × heads of a group of a sequence on average."""
    return math.ceil(operands.q.shape[1] / operands.block_tables.shape[1]) * _heads(operands)


def blocks_of(operands: Operands, spec: CacheSpec) -> tuple[int, int, int]:
    """block_q, block_k and stages. Tiles may not follow from the step if bits are not to depend on the batch."""
    has_few_rows = average_rows(operands) <= ONE_WARPGROUP and not spec.batch_invariant
    if operands.kv_pages.dtype.itemsize == 1:
        blocks = BLOCKS_OF_FEW_ROWS_OF_EIGHT_BITS if has_few_rows else BLOCKS_OF_EIGHT_BITS
    else:
        blocks = BLOCKS | (BLOCKS_OF_FEW_ROWS if has_few_rows else {})
    return _of_head_dim(blocks, operands)


def _of_head_dim(blocks: dict[int, tuple[int, int, int]], operands: Operands) -> tuple[int, int, int]:
    return next(of_features for most, of_features in blocks.items() if operands.q.shape[3] <= most)


def packed_heads(operands: Operands) -> int:
    """Heads of a group that a tile has together."""
    return math.gcd(_heads(operands), MOST_PACKED_HEADS)


def is_one_launch(operands: Operands, spec: CacheSpec, target: Target) -> bool:
    """Whether decodes have tiles as prefills have: where all are computed at once, if each sequence has one for its
    heads. A second launch, which most often finds nothing, would take 4 µs.

    A plan is one of decodes, and bits that do not depend on the batch cannot come from different kernels.
    """
    sequences = operands.q.shape[0] * operands.block_tables.shape[1]
    at_once = sequences * (operands.q.shape[2] // packed_heads(operands)) <= (target.core_count or DEFAULT_CORE_COUNT)
    return at_once and operands.plan is None and not spec.batch_invariant


def least_decodes(operands: Operands, spec: CacheSpec, target: Target) -> int | None:
    """The fewest decodes that have tiles beside prefills, so many that each multiprocessor has one; None if they never
    have: where a plan divides them, and where bits may not depend on how many there are.
    """
    if operands.plan is not None or operands.draft_mask is not None or spec.batch_invariant:
        return None
    if operands.kv_pages.dtype.itemsize == 1:  # Triton reads them as fast as their conversion for a tile takes
        return None
    tiles = operands.q.shape[2] // packed_heads(operands)
    return math.ceil((target.core_count or DEFAULT_CORE_COUNT) / tiles)


def decoded(operands: Operands) -> int:
    """The most tokens of a sequence that Triton decodes: as many as its smallest tile has rows for."""
    return max(1, _paged.SMALLEST_TILE // _heads(operands))


def pages_per_block(page: int, block_k: int) -> int:
    """Pages, or parts of a page, that a block of keys is copied from."""
    return max(1, block_k // page)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """Configs of the decode that may be best, the likeliest first."""
    found = triton.space(spec, operands, target, decoded(operands))
    found = found[:1] if is_one_launch(operands, spec, target) else found
    return [replace(config, platform=Platform.PALLAS) for config in found]


def excess(operands: Operands, config: RaggedPageAttentionConfig) -> str | None:
    """What the decode has against a config for these operands where the environment limits shared memory, or None."""
    return triton.excess(operands, config, decoded(operands))


@kernel_registry.register("ragged_page_attention", Platform.PALLAS, Backend.GPU, priority=200)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o and lse of a step over pages, its prefills by the Hopper kernel."""
    from .forward import prefill

    x = Operands(*operands)
    _paged.check("ragged_page_attention", excess(x, config))
    if is_one_launch(x, spec, gpu_target()):
        found = Outputs(**prefill(x, spec, 0)[0])
        return found if x.draft_mask is None else triton.with_drafts(x, spec, found)
    return triton.attended(x, spec, config, lambda most: prefill(x, spec, most), decoded(x))
