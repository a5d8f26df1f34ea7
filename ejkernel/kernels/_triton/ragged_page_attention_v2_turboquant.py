"""ragged_page_attention_v2_turboquant in Triton: attention over a cache quantised by TurboQuant."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v2_turboquant import Operands, Outputs
from ejkernel.types import Backend, Platform
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from .._xla._turboquant import matrices_of, pools_of
from . import _launch, _paged, _turboquant


@kernel_registry.register("ragged_page_attention_v2_turboquant", Platform.TRITON, Backend.GPU, priority=100)
@_paged.limited_by(_turboquant.excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: _turboquant.space(*call)[0], _turboquant.space, refuses=_paged.refuses)
@supported_if(_turboquant.supports)
def ragged_page_attention_v2_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_page_attention_v2_turboquant, by the Triton kernel."""
    from ._turboquant.launch import attend

    x = Operands(*operands)
    _paged.check("ragged_page_attention_v2_turboquant", _turboquant.excess(x, config))
    return Outputs(*attend(x, pools_of(x), matrices_of(x), spec, config.num_splits, _turboquant.tiles_of(x, config)))
