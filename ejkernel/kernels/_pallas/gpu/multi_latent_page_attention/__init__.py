"""multi_latent_page_attention on Hopper GPUs: the absorbed form over pages, by a Pallas kernel of Mosaic GPU.

The table of work tiles is made, and parts of the keys are merged, by kernels of Triton. Pallas is imported only when
the kernel is first needed.
"""

import math
from functools import partial

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton import multi_latent_page_attention as of_triton
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

from .._supports import refuses_scale, refuses_target

# Features of a latent and of its rotary part. The weights take the place of the latter.
LATENT, ROPE = 512, 64
# A page, or the part of it in a tile of keys, is copied in tiles of 8 rows; fewer than 16 make too many copies.
SMALLEST_PAGE, BLOCK_K = 16, 64
# Rows of a thread block, heads of tokens.
ROWS = (16, 32, 64)
# In microseconds on an H200: the start and end of a thread block, a second launch; two tiles of keys by rows as the
# products take them, as one multiprocessor reads them alone, and by rows those of eight bits, which are converted.
# Bytes a microsecond from memory and of the parts from L2.
START, MERGE, PAIR, ALONE, CONVERTED_PAIR = 5.0, 4.0, {16: 2.0, 32: 2.4, 64: 4.2}, 3.5, {16: 3.7, 32: 4.3, 64: 4.6}
BANDWIDTH, PARTS_BANDWIDTH = 4.1e6, 2.5e6


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    if wrong := refuses_target(target) or _launch.refusal(target):
        return wrong
    q, pages = operands.q_latent, operands.pages
    if q.dtype.name not in ("bfloat16", "float16"):
        return f"q_latent is {q.dtype}; the kernel takes bfloat16 and float16"
    if wrong := _refuses_eight_bits(operands) if pages.dtype.itemsize == 1 else None:
        return wrong
    if operands.k_scale is not None and pages.dtype.itemsize > 1:
        return f"k_scale with pages of {pages.dtype}; the kernel takes one with pages of eight bits"
    keys = operands.block_tables if operands.indices is None else operands.indices
    if 0 in (*q.shape, *pages.shape, *operands.block_tables.shape, *keys.shape):
        return "no tokens, sequences, heads, slots or keys"
    if (sizes := (q.shape[3], operands.q_rope.shape[3])) != (LATENT, ROPE):
        return (
            f"{sizes[0]} and {sizes[1]} features; the kernel takes {LATENT} of a latent and {ROPE} of its rotary part"
        )
    if spec.batch_invariant:
        return "batch_invariant is not supported by these kernels"
    wrong = _refuses_pages(spec, operands, target) if operands.indices is None else None
    return wrong or refuses_scale(spec)


def _refuses_eight_bits(operands: Operands) -> str | None:
    """Why the kernel does not take pages of eight bits, or None."""
    pages, scale = operands.pages, operands.k_scale
    if operands.draft_mask is not None:
        return f"draft_mask with pages of {pages.dtype}"
    if scale is None:
        return None
    if scale.shape[:3] not in ((1, 1, 1), pages.shape[:3]):
        return (
            f"k_scale is {list(scale.shape[:3])}; the kernel takes one, or those of the pages, {list(pages.shape[:3])}"
        )
    if operands.q_latent.dtype.name == "float16":
        return "k_scale with q_latent in float16, where weights times the scales of slots may overflow"
    return None


def _refuses_pages(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    if (page := operands.pages.shape[2]) % SMALLEST_PAGE or (page % BLOCK_K and BLOCK_K % page):
        return f"pages of {page} slots; the kernel takes 16, 32 and multiples of {BLOCK_K}"
    return None if operands.draft_mask is None else of_triton.supports(spec, operands, target)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    heads, sequences = operands.q_latent.shape[2], operands.context_lens.shape[1]
    has_lists = operands.indices is not None
    together = 1 if has_lists else max(1, operands.q_latent.shape[1] // sequences)
    rows = next((rows for rows in ROWS if rows >= heads * together), ROWS[-1])
    tokens = 1 if has_lists else max(1, rows // heads)
    return [
        MultiLatentPageAttentionConfig(
            queries_per_block=tokens, heads_per_block=rows, keys_per_block=BLOCK_K, num_splits=splits, num_warps=12,
            num_stages=2, platform=Platform.PALLAS, backend=Backend.GPU,
        )
        for splits in _splits(spec, operands, target, tokens, rows)
    ]  # fmt: skip


def _splits(spec: CacheSpec, operands: Operands, target: Target, tokens: int, rows: int) -> list[int]:
    """Into how many parts to cut: what is asked for, or those of the least time by the model, the fastest first."""
    if spec.num_splits is not None:
        return [spec.num_splits]
    (batch, step, heads, _), sequences = operands.q_latent.shape, operands.context_lens.shape[1]
    blocks = batch * min(step, max(sequences, step // tokens)) * math.ceil(heads / rows)
    slots = operands.block_tables.shape[2] * operands.pages.shape[2]
    keys = slots if operands.indices is None else operands.indices.shape[2]
    pairs = math.ceil(keys / (2 * BLOCK_K))
    cores, size = target.core_count or DEFAULT_CORE_COUNT, operands.pages.dtype.itemsize
    least = CONVERTED_PAIR[rows] if size == 1 else max(PAIR[rows], ALONE)
    read = 2 * BLOCK_K * (LATENT + ROPE) * size / math.ceil(heads / rows) / BANDWIDTH
    cut = partial(modelled_microseconds, blocks, least, read, batch * step * heads, cores)
    times = {
        splits: cut(splits, math.ceil(pairs / splits))
        for splits in {math.ceil(pairs / each) for each in range(1, pairs + 1)}
        if splits <= max(1, cores)
    }
    return sorted(times, key=times.get)[:3]


def modelled_microseconds(
    blocks: int, least: float, read: float, of_step: int, cores: int, splits: int, pairs: int
) -> float:
    """The time of a step on an H200 if each of its thread blocks is cut into parts of so many pairs of tiles.

    Thread blocks come in waves, one to a multiprocessor. A pair takes `least`, or `read` for each block of a wave,
    which is its share of what is read from memory once for all heads. Parts have a result in float32 for each of the
    rows `of_step`, which is written and read by way of the L2 cache.
    """
    waves = math.ceil(blocks * splits / cores)
    of_pair = max(least, read * min(cores, blocks * splits))
    of_parts = splits * of_step * LATENT * 4 / PARTS_BANDWIDTH
    return waves * (START + pairs * of_pair) + (MERGE + of_parts if splits > 1 else 0)


def refuses(config: MultiLatentPageAttentionConfig) -> str | None:
    """What the kernel has against a config, or None."""
    if config.keys_per_block != BLOCK_K:
        return f"config.keys_per_block is {config.keys_per_block}; the kernel takes {BLOCK_K}"
    if config.heads_per_block not in ROWS:
        return f"config.heads_per_block is {config.heads_per_block}; the kernel takes {', '.join(map(str, ROWS))}"
    return None


@kernel_registry.register("multi_latent_page_attention", Platform.PALLAS, Backend.GPU, priority=200)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=refuses)
@supported_if(supports)
def multi_latent_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: MultiLatentPageAttentionConfig = MultiLatentPageAttentionConfig(),
) -> Outputs:
    """o and lse of a step over pages of latents, by the Hopper kernel."""
    from .forward import multi_latent_page_attention

    return multi_latent_page_attention(Operands(*operands), spec, config)
