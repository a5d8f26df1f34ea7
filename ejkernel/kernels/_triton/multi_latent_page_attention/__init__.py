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
    if reason := _launch.refusal(target):
        return reason
    q, pages = operands.q_latent, operands.pages
    if q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q_latent is {q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if pages.dtype.name == "float8_e4m3fn" and (target.platform != "cuda" or target.compute_capability < 89):
        return f"float8_e4m3fn needs compute capability 8.9; {target} has {target.capability}"
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
    """o and lse."""
    from .kernel import multi_latent_page_attention

    x = Operands(*operands)
    if wrong := excess(x, config):
        raise ValueError(f"multi_latent_page_attention (triton): {wrong}")
    return multi_latent_page_attention(x, spec, config)


multi_latent_page_attention.excess = excess
