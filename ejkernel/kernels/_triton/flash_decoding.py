"""flash_attention of few queries in Triton: the kernels of a dense cache, which split the keys (Flash-Decoding).

One query of a long sequence gives a kernel that has a program for each tile of queries and head too few of them.
"""

import jax
import jax.numpy as jnp
from jax import Array

from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

from .._registry import configured_by, emits, kernel_registry, supported_if
from .._target import gpu_target
from . import _launch, _paged

_TAKEN = ("q", "k", "v", "sinks")


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels do not take the operands (arrays or shapes), or None."""
    if others := [name for name, x in operands._asdict().items() if x is not None and name not in _TAKEN]:
        return f"{', '.join(others)}: the decoding kernels, which split keys, take q, k, v and sinks alone"
    if spec.precision is not None:
        return f"precision {spec.precision!r}: the decoding kernels compute in the dtype of q"
    if spec.window[1] is not None and not (spec.causal and spec.window[1] >= 0):
        return "a window to the right of the query: the decoding kernels mask none"
    (_, queries, heads, _), groups = operands.q.shape, operands.k.shape[2]
    if queries > 1 and (rows := queries * (heads // max(groups, 1))) > _paged.LARGEST_DECODE_TILE:
        return f"{rows} queries × heads of a group; the decoding kernels take {_paged.LARGEST_DECODE_TILE}"
    return _paged.refusal(target, _shapes(operands))


def space(spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """Configs that may be best, the likeliest first."""
    found = dict.fromkeys(tiles for tiles, _ in _choices(spec, operands, target))
    how = dict(platform=Platform.TRITON, backend=Backend.GPU)
    return [KernelConfig(block_k=of.keys, num_warps=of.warps, num_stages=of.stages, **how) for of in found]


def excess(operands: Operands, config: KernelConfig) -> str | None:
    """What the kernels have against a config for these operands where the environment limits shared memory, or None."""
    return _paged.excess(_shapes(operands), _tiles(operands, config))


@kernel_registry.register("flash_attention", Platform.TRITON, Backend.GPU, priority=300)
@_paged.limited_by(excess)
@emits(*_launch.CUSTOM_CALLS)
@configured_by(lambda *call: space(*call)[0], space, refuses=lambda config: _launch.refuses("flash_attention", config))
@supported_if(supports)
def flash_attention(
    *operands: Array | None,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """o and lse, with the number of splits that goes with the tiles of the config."""
    from ._paged.launch import Step, attend

    x = Operands(*operands)
    _paged.check("flash_attention", excess(x, config))
    tiles = _tiles(x, config)
    splits = next((n for of, n in _choices(spec, x, gpu_target()) if of == tiles), 1)
    step = Step(x.q, x.k[:, None], x.v[:, None], sinks=x.sinks)
    o, lse = attend(step, _cache_spec(spec), 1, splits, tiles, causal=spec.causal, sinks_of_empty=True)
    return Outputs(o, jnp.moveaxis(lse, 2, 1))


def _cache_spec(spec: FlashAttentionSpec) -> CacheSpec:
    left = spec.window[0]
    return CacheSpec(
        window=None if left is None else left + 1,
        softcap=spec.softcap,
        softmax_scale=spec.softmax_scale,
        batch_invariant=spec.batch_invariant,
    )


def _choices(spec: FlashAttentionSpec, x: Operands, target: Target) -> list[tuple[_paged.TileConfig, int]]:
    return _paged.choices(_cache_spec(spec), target, _shapes(x), x.k.shape[1])


def _tiles(x: Operands, config: KernelConfig) -> _paged.TileConfig:
    return _paged.decode_tiles(_shapes(x), config.block_k, config.num_warps, config.num_stages)


def _shapes(x: Operands) -> _paged.Shapes:
    """Those of keys and values [b,1,t,g,·], a page of each sequence."""
    of_page = lambda a: jax.ShapeDtypeStruct((a.shape[0], 1, *a.shape[1:]), a.dtype)
    return _paged.Shapes(x.q, of_page(x.k), of_page(x.v), sequences=1, tokens=x.q.shape[1], tables=False)
