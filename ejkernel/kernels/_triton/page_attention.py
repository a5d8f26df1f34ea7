"""page_attention in Triton: split-KV decoding over pages, from compute capability 8.0 on, and on ROCm."""

from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.page_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.page_attention import PageAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from .._visibility import interval
from . import _decode, _launch


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    return _decode.refusal(spec, target, operands.q, operands.k_pages, operands.v_pages)


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[PageAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    keys = operands.block_tables.shape[2] * operands.k_pages.shape[2]
    return _decode.space(spec, target, operands.q, operands.k_pages, operands.v_pages, keys)


def excess(operands: Operands, config: PageAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    return _decode.excess(operands.q, operands.k_pages, operands.v_pages, config)


@kernel_registry.register("page_attention", Platform.TRITON, Backend.GPU, priority=100)
@_decode.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_decode.refuses)
@supported_if(supports)
def page_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: PageAttentionConfig = PageAttentionConfig(),
) -> Outputs:
    """o and lse."""
    from ._decode.kernel import decode

    x = Operands(*operands)
    if wrong := excess(x, config):
        raise ValueError(f"page_attention (triton): {wrong}")
    in_table = x.block_tables.shape[2] * x.k_pages.shape[2]
    left = None if spec.window is None else spec.window - 1
    first, stop = interval(x.context_lens - 1, left, None, 0, x.context_lens.clip(0, in_table))
    splits = spec.num_splits or config.num_splits
    config = _decode.of_launch(config)
    return Outputs(
        *decode(x.q, x.k_pages, x.v_pages, first, stop, x.context_lens > 0, x.block_tables, x.sinks,
                x.k_scale, x.v_scale, spec=spec, splits=splits, config=config)
    )  # fmt: skip
