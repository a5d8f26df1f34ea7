"""ragged_page_attention_v3_turboquant in Triton: the step's keys and values go into the pages, and its tokens attend.

XLA quantises them, and scatters their bytes and norms in place.
"""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3_turboquant import Operands, Outputs
from ejkernel.types import Backend, Platform
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from .._xla._pages import over_batch
from .._xla._turboquant import matrices_of, written
from . import _launch, _paged, _turboquant


@kernel_registry.register("ragged_page_attention_v3_turboquant", Platform.TRITON, Backend.GPU, priority=100)
@_paged.limited_by(_turboquant.excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: _turboquant.space(*call)[0], _turboquant.space, refuses=_paged.refuses)
@supported_if(_turboquant.supports)
def ragged_page_attention_v3_turboquant(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pools with the step's keys and values."""
    from ._turboquant.launch import attend

    x = Operands(*operands)
    _paged.check("ragged_page_attention_v3_turboquant", _turboquant.excess(x, config))
    _, pools = over_batch(written, x._replace(sinks=None))
    o, lse = attend(x, pools, matrices_of(x), spec, config.num_splits, _turboquant.tiles_of(x, config))
    return Outputs(o, lse, *pools)
