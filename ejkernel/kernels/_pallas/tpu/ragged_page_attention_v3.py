"""ragged_page_attention_v3 on TPU: one kernel writes the step's keys and values into the pages, another one attends."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3 import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from ..._registry import configured_by, kernel_registry, supported_if
from . import _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    # Scalar memory holds two numbers for each token, which say where it is written.
    written = 2 * operands.q.shape[0] * operands.q.shape[1]
    return _paged.ragged_refusal(spec, target, operands, operands.q, operands.kv_pages) or _paged.table_refusal(
        0, written
    )


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """The configs worth measuring, the most promising first."""
    return [
        RaggedPageAttentionConfig(*sizes, platform=Platform.PALLAS, backend=Backend.TPU)
        for sizes in _paged.ragged_sizes(spec, operands, operands.q, operands.kv_pages)
    ]


@kernel_registry.register("ragged_page_attention_v3", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_page_attention_v3(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedPageAttentionConfig = RaggedPageAttentionConfig(),
) -> Outputs:
    """o, lse, and the pages with the step's keys and values."""
    from ._paged.ragged import ragged, step_of
    from ._paged.write import write

    x = Operands(*operands)
    pages = write(x, step_of(x, x.q.shape[1], x.kv_pages.shape[2], spec), "ragged_page_attention_v3_write")
    found = ragged(x, x.q, pages, (None, None), spec, config, "ragged_page_attention_v3")
    return Outputs(*found, pages)
