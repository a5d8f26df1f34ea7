"""ragged_page_attention_v2_turboquant on TPU: tiles of the tokens of prefill and decode, over quantised pages."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v2_turboquant import Operands, Outputs
from ejkernel.types import Backend, Platform
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from . import _paged, _turboquant


@kernel_registry.register("ragged_page_attention_v2_turboquant", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: _turboquant.space(*call)[0], _turboquant.space, refuses=_paged.refuses)
@supported_if(_turboquant.supports)
def ragged_page_attention_v2_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention_v2_turboquant, by the Pallas kernels for TPUs."""
    from ._turboquant.step import attention, stored_pools

    x = Operands(*operands)
    return Outputs(*attention(x, stored_pools(x), spec, config, "ragged_page_attention_v2_turboquant"))
