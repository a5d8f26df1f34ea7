"""ragged_page_attention_v3_turboquant on TPU: one kernel writes quantised keys and values, another one attends."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3_turboquant import Operands, Outputs
from ejkernel.types import Backend, Platform
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from . import _paged, _turboquant


@kernel_registry.register("ragged_page_attention_v3_turboquant", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: _turboquant.space(*call)[0], _turboquant.space, refuses=_paged.refuses)
@supported_if(_turboquant.supports)
def ragged_page_attention_v3_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pools with the step's keys and values."""
    from ._paged.ragged import step_of
    from ._turboquant.step import attention, in_pages, stored_pools
    from ._turboquant.write import write

    x = Operands(*operands)
    step = step_of(x, x.q.shape[1], x.value_norms_pages.shape[2], spec)
    pools = write(x, stored_pools(x), step, "ragged_page_attention_v3_turboquant_write")
    found = attention(x, pools, spec, config, "ragged_page_attention_v3_turboquant")
    return Outputs(*found, *in_pages(x, pools))
