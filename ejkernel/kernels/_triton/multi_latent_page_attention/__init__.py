"""multi_latent_page_attention in Triton: the absorbed form over pages, from compute capability 8.0 on, and on ROCm.

Triton and jax-triton are imported only when a kernel is first needed.
"""

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.multi_latent_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from .configs import TRANSPOSED, excess, memory_refusal, refuses, space

LARGEST_LATENT, LARGEST_ROPE = 512, 128


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    q, pages = operands.q_latent, operands.pages
    wrong = _launch.refusal(target) or _launch.dtype_refusal("q_latent", q)
    if wrong := wrong or _launch.cache_dtype_refusal(pages, target):
        return wrong
    if 0 in (*q.shape, *pages.shape, *operands.block_tables.shape):
        return "no tokens, sequences, heads or slots"
    for name, limit in (("q_latent", LARGEST_LATENT), ("q_rope", LARGEST_ROPE)):
        if (size := getattr(operands, name).shape[3]) > limit:
            return f"{name} has {size} features; the kernel takes up to {limit}"
    return memory_refusal(operands, target)


@kernel_registry.register("multi_latent_page_attention", Platform.TRITON, Backend.GPU, priority=100)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, (TRANSPOSED,), refuses)
@supported_if(supports)
def multi_latent_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: MultiLatentPageAttentionConfig = MultiLatentPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of multi_latent_page_attention, by the Triton kernels."""
    from .kernel import multi_latent_page_attention

    x = Operands(*operands)
    if wrong := excess(x, config):
        raise ValueError(f"multi_latent_page_attention (triton): {wrong}")
    return multi_latent_page_attention(x, spec, config)


multi_latent_page_attention.excess = excess
