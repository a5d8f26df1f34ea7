"""ragged_page_attention on TPU: tiles of the tokens of prefill, decode and drafts, over pages."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from . import _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    x = operands
    return _paged.ragged_refusal(spec, target, x, x.q, x.kv_pages)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """The configs worth measuring, the most promising first."""
    return [
        RaggedPageAttentionConfig(*sizes, platform=Platform.PALLAS, backend=Backend.TPU)
        for sizes in _paged.ragged_sizes(spec, operands, operands.q, operands.kv_pages)
    ]


@kernel_registry.register("ragged_page_attention", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention, by the Pallas kernels for TPUs."""
    from ._paged.ragged import ragged

    x = Operands(*operands)
    scales = x.k_scale, x.v_scale
    return Outputs(*ragged(x, x.q, x.kv_pages, scales, spec, config, "ragged_page_attention"))
