"""ragged_decode_attention in Triton: split-KV decoding over a dense cache, which is one page of each sequence."""

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.ragged_decode_attention import Operands, Outputs
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.ragged_decode_attention import RaggedDecodeAttentionConfig

from .._registry import configured_by, emits, kernel_registry, supported_if
from . import _launch, _paged


def supports(spec: CacheSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    return _paged.refusal(target, _shapes(operands))


def space(spec: CacheSpec, operands: Operands, target: Target) -> list[RaggedDecodeAttentionConfig]:
    """Configs that may be best, the likeliest first."""
    found = _paged.choices(spec, target, _shapes(operands), operands.k.shape[1])
    return _paged.configs(RaggedDecodeAttentionConfig, found)


def excess(operands: Operands, config: RaggedDecodeAttentionConfig) -> str | None:
    """What the kernel has against a config for these operands where the environment limits shared memory, or None."""
    shapes = _shapes(operands)
    return _paged.excess(shapes, _paged.tiles_of(shapes, config))


@kernel_registry.register("ragged_decode_attention", Platform.TRITON, Backend.GPU, priority=100)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=_paged.refuses)
@supported_if(supports)
def ragged_decode_attention(
    *operands: Array | None,
    spec: CacheSpec = CacheSpec(),
    config: RaggedDecodeAttentionConfig = RaggedDecodeAttentionConfig(),
) -> Outputs:
    """The results o and lse of ragged_decode_attention, by the Triton kernels."""
    from ._paged.launch import Step, attend

    x = Operands(*operands)
    _paged.check("ragged_decode_attention", excess(x, config))
    end = jnp.clip(x.sequence_end, 0, x.k.shape[1])
    q, k, v, end, start = (a[:, None] for a in (x.q, x.k, x.v, end, x.sequence_start))
    step = Step(q, k, v, end, first_keys=start, sinks=x.sinks)
    splits = spec.num_splits or config.num_splits
    o, lse = attend(step, spec, 1, splits, _paged.tiles_of(_shapes(x), config), sinks_of_empty=True)
    return Outputs(o[:, 0], lse[:, 0])


def _shapes(x: Operands) -> _paged.Shapes:
    """Those of queries [b,1,h,d], and of keys and values [b,1,t,g,·], a page of each sequence."""
    one = lambda a: jax.ShapeDtypeStruct((a.shape[0], 1, *a.shape[1:]), a.dtype)
    return _paged.Shapes(*map(one, (x.q, x.k, x.v)), sequences=1, tables=False)
