"""ragged_page_attention_v3 on Hopper GPUs: XLA writes the step's keys and values, then as ragged_page_attention."""

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch, _paged
from ejkernel.kernels._triton import ragged_page_attention_v3 as triton
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3 import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from . import ragged_page_attention as attention


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    return attention.supports(spec, triton.operands_over_pages(operands), target)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """Configs of the decode that may be best, the likeliest first."""
    return attention.space(spec, triton.operands_over_pages(operands), target)


def excess(operands: Operands, config: RaggedPageAttentionConfig) -> str | None:
    """What the decode has against a config for these operands where the environment limits shared memory, or None."""
    return attention.excess(triton.operands_over_pages(operands), config)


@kernel_registry.register("ragged_page_attention_v3", Platform.PALLAS, Backend.GPU, priority=200)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_page_attention_v3(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pages with the step's keys and values."""
    return triton.after_writing(attention.ragged_page_attention, Operands(*operands), spec, config)
