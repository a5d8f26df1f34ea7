"""ragged_page_attention_v3 in Triton: the step's keys and values go into the pages, and its tokens attend over them."""

from collections.abc import Callable

import jax
from jax import Array

from ejkernel.primitives import ragged_page_attention as over_pages
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_page_attention_v3 import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_page_attention_v3 import RaggedPageAttentionConfig

from .._places import places, written
from .._registry import configured_by, emits, kernel_registry, supported_if
from . import _launch, _paged
from . import ragged_page_attention as attention


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    return attention.supports(spec, operands_over_pages(operands), target)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedPageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    return attention.space(spec, operands_over_pages(operands), target)


def excess(operands: Operands, config: RaggedPageAttentionConfig) -> str | None:
    """What the kernels have against a config for these operands where the environment limits shared memory, or None."""
    return attention.excess(operands_over_pages(operands), config)


@kernel_registry.register("ragged_page_attention_v3", Platform.TRITON, Backend.GPU, priority=100)
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
    return after_writing(attention.ragged_page_attention, Operands(*operands), spec, config)


def after_writing(
    attend: Callable[..., over_pages.Outputs], x: Operands, spec: CacheSpec, config: RaggedPageAttentionConfig
) -> Outputs:
    """What `attend` computes over the pages with the step's keys and values, which XLA scatters in place."""
    scatter = lambda x: written(x, places(x.q.shape[0], x.context_lens, x.query_start_loc, x.num_seqs))
    pages = jax.vmap(scatter)(x._replace(sinks=None))
    found = attend(*operands_over_pages(x._replace(kv_pages=pages)), spec=spec, config=config)
    return Outputs(*found, pages)


def operands_over_pages(x: Operands) -> over_pages.Operands:
    """The operands of ragged_page_attention: those without the step's keys and values."""
    return over_pages.Operands(
        x.q, x.kv_pages, x.context_lens, x.block_tables, x.query_start_loc, x.num_seqs, sinks=x.sinks
    )
