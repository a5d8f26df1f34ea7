"""page_attention in Triton: split-KV decoding over pages, from compute capability 8.0 on, and on ROCm."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.page_attention import PageAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from . import _launch, _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    return _paged.refusal(target, _shapes(operands))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[PageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    keys = operands.block_tables.shape[2] * operands.k_pages.shape[2]
    found = _paged.choices(spec, target, _shapes(operands), keys)
    return _paged.configs(PageAttentionConfig, found)


def excess(operands: Operands, config: PageAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    shapes = _shapes(operands)
    return _paged.excess(shapes, _paged.tiles_of(shapes, config))


@kernel_registry.register("page_attention", Platform.TRITON, Backend.GPU, priority=100)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: PageAttentionConfig = PageAttentionConfig(),
) -> Outputs:
    """The results o and lse of page_attention, by the Triton kernels."""
    from ._paged.launch import Step, attend

    x = Operands(*operands)
    _paged.check("page_attention", excess(x, config))
    plan = x.plan if x.plan is not None and x.plan.shape[1] == x.q.shape[1] else None
    step = Step(
        x.q, x.k_pages, x.v_pages, x.context_lens, block_tables=x.block_tables, sinks=x.sinks,
        k_scale=x.k_scale, v_scale=x.v_scale, plan=plan,
    )  # fmt: skip
    tiles = _paged.tiles_of(_shapes(x), config)
    return Outputs(*attend(step, spec, x.q.shape[1], spec.num_splits or config.num_splits, tiles))


def _shapes(x: Operands) -> _paged.Shapes:
    return _paged.Shapes(x.q, x.k_pages, x.v_pages, x.q.shape[1])
