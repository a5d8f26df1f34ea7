"""ragged_page_attention on Hopper GPUs: decodes by Triton's kernels, prefills by a Pallas kernel of Mosaic GPU.

Pallas is imported only when a kernel is first needed.
"""

import math
from dataclasses import replace

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch, _paged
from ejkernel.kernels._triton import ragged_page_attention as triton
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._supports import refuses_given, refuses_scale, refuses_target

# By the head dim: block_q, block_k and stages (flash_attention/configs.py). Sequences are seldom so long that 192
# queries of them would pay.
BLOCKS = {64: (128, 128, 4), 128: (128, 128, 2), 192: (128, 64, 2), 256: (128, 64, 2)}
# A page, or the part of it in a block of keys, is copied in tiles of 8 rows; fewer than 16 make too many copies.
SMALLEST_PAGE = 16
# With fewer tokens, or sequences of fewer rows (tokens × heads of a group), most rows of a tile are empty.
LEAST_TOKENS, LEAST_ROWS = 64, 32
ABSENT = ("k_scale", "v_scale", "draft_mask")


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    if wrong := refuses_target(target):
        return wrong
    q, kv = operands.q, operands.kv_pages
    if q.dtype.name not in ("bfloat16", "float16") or kv.dtype != q.dtype:
        return f"q is {q.dtype} and pages {kv.dtype}; the kernel takes bfloat16 and float16, of both the same"
    if wrong := refuses_given(operands, ABSENT) or triton.supports(spec, operands, target):
        return wrong
    if q.shape[3] not in BLOCKS:
        return f"a head dim of {q.shape[3]}; the kernel takes {', '.join(map(str, BLOCKS))}"
    page, block_k = kv.shape[2], BLOCKS[q.shape[3]][1]
    if page % SMALLEST_PAGE or (page % block_k and block_k % page):
        whole = f"multiples of {SMALLEST_PAGE} that divide {block_k}, or multiples of that"
        return f"pages of {page} slots; the kernel takes {whole}"
    if wrong := refuses_scale(spec):
        return wrong
    if q.shape[1] < LEAST_TOKENS:
        return f"{q.shape[1]} tokens in the step; the kernel takes {LEAST_TOKENS} or more"
    if (rows := math.ceil(q.shape[1] / operands.block_tables.shape[1]) * _heads(operands)) < LEAST_ROWS:
        average = f"sequences of {rows} tokens × heads of a group on average"
        return f"{average}; below {LEAST_ROWS} Triton's decoding kernel is faster"
    return None


def _heads(operands: Operands) -> int:
    """Query heads that share a key/value head."""
    return operands.q.shape[2] // operands.kv_pages.shape[3]


def decoded(operands: Operands) -> int:
    """The most tokens of a sequence that Triton decodes: as many as its smallest tile has rows for."""
    return max(1, _paged.SMALLEST_TILE // _heads(operands))


def pages_per_block(page: int, block_k: int) -> int:
    """Pages, or parts of a page, that a block of keys is copied from."""
    return max(1, block_k // page)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """Configs of the decode that may be best, the likeliest first."""
    found = triton.space(spec, operands, target, decoded(operands))
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
    return triton.attended(x, spec, config, lambda most: prefill(x, spec, most), decoded(x))
