"""multi_latent_page_attention on Hopper GPUs: the absorbed form over pages, by a Pallas kernel of Mosaic GPU.

Parts of the keys are merged by a kernel of Triton. Pallas is imported only when the kernel is first needed.
"""

import math

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig
from ejkernel.types.target import DEFAULT_CORE_COUNT

from .._internals import moved
from ..flash_attention import HOPPER, MOST_SOFTCAP

# Features of a latent and of its rotary part. The weights take the place of the latter.
LATENT, ROPE = 512, 64
# A page, or the part of it in a tile of keys, is copied in tiles of 8 rows; fewer than 16 make too many copies.
SMALLEST_PAGE, BLOCK_K, ROWS = 16, 64, 64
# Keys that a part has at least, so that merging costs little beside it.
LEAST_KEYS = 512
ABSENT = ("k_scale", "draft_mask", "indices")


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    if target.platform != "cuda":
        return f"Mosaic GPU runs on cuda, not on {target.platform}"
    if target.compute_capability != HOPPER:
        return f"the kernel is for compute capability 9.0, not {target.capability}"
    if reason := moved() or _launch.refusal(target):
        return reason
    q, pages = operands.q_latent, operands.pages
    if q.dtype.name not in ("bfloat16", "float16") or pages.dtype != q.dtype:
        return f"q_latent is {q.dtype} and pages {pages.dtype}; the kernel takes bfloat16 and float16, of both the same"
    for name in ABSENT:
        if getattr(operands, name) is not None:
            return f"{name} is not supported by this kernel"
    if 0 in (*q.shape, *pages.shape, *operands.block_tables.shape):
        return "no tokens, sequences, heads or slots"
    if (sizes := (q.shape[3], operands.q_rope.shape[3])) != (LATENT, ROPE):
        return (
            f"{sizes[0]} and {sizes[1]} features; the kernel takes {LATENT} of a latent and {ROPE} of its rotary part"
        )
    if (page := pages.shape[2]) % SMALLEST_PAGE or (page % BLOCK_K and BLOCK_K % page):
        return f"pages of {page} slots; the kernel takes 16, 32 and multiples of {BLOCK_K}"
    if spec.batch_invariant:
        return "batch_invariant is not supported by this kernel"
    if spec.softmax_scale <= 0:
        return f"softmax_scale is {spec.softmax_scale:g}; the kernel takes row maxima before scaling: it must be > 0"
    if (softcap := spec.softcap or 1.0) > MOST_SOFTCAP:
        return f"softcap is {softcap:g}; the tanh of the kernel is accurate enough up to {MOST_SOFTCAP:g}"
    if spec.softmax_scale / softcap > 1e38:
        return f"softmax_scale / softcap is {spec.softmax_scale:g} / {softcap:g}, which overflows float32"
    return None


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[MultiLatentPageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    tokens = max(1, ROWS // operands.q_latent.shape[2])
    return [
        MultiLatentPageAttentionConfig(
            queries_per_block=tokens, heads_per_block=ROWS, keys_per_block=BLOCK_K, num_splits=splits, num_warps=12,
            num_stages=2, platform=Platform.PALLAS, backend=Backend.GPU,
        )
        for splits in _splits(spec, operands, target, tokens)
    ]  # fmt: skip


def _splits(spec: CacheSpec, operands: Operands, target: Target, tokens: int) -> list[int]:
    """Into how many parts to cut: what is asked for, or so many that all thread blocks run at once."""
    if spec.num_splits is not None:
        return [spec.num_splits]
    (batch, step, heads, _), sequences = operands.q_latent.shape, operands.context_lens.shape[1]
    blocks = batch * min(step, max(sequences, step // tokens)) * math.ceil(heads / ROWS)
    most = max(1, operands.block_tables.shape[2] * operands.pages.shape[2] // LEAST_KEYS)
    likely = min(most, max(1, (target.core_count or DEFAULT_CORE_COUNT) // blocks))
    return list(dict.fromkeys([likely, min(most, 2 * likely), max(1, likely // 2)]))


def refuses(config: MultiLatentPageAttentionConfig) -> str | None:
    """What the kernel has against a config, or None."""
    if config.keys_per_block != BLOCK_K:
        return f"config.keys_per_block is {config.keys_per_block}; the kernel takes {BLOCK_K}"
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
    """o and lse."""
    from .forward import multi_latent_page_attention

    return multi_latent_page_attention(Operands(*operands), spec, config)
