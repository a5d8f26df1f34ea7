"""The absorbed forward of flash_mla: few queries attend to the latents themselves, one key and value for all heads.

With c_j the latent of position j, r_j its rotary part, the projections W of keys and U of values of a head h, and a
query q_ih = [n_ih, m_ih] that is divided as its key is,

    q_ih · k_jh = (n_ih W_hᵀ)·c_j + m_ih·r_j                o_ih = Σ_j p_ijh (c_j U_h) = (Σ_j p_ijh c_j) U_h

so the queries [n_ih W_hᵀ, m_ih] of R + Dr features attend to keys [c_j, r_j] with values c_j, and U projects what they
find. No array has the keys or values of every head. Of a batch element whose queries see P pairs, the forms cost

                flops                                            numbers that are written and read again
    expanded    2·K·R·H·(Dn + V) + 2·P·H·(Dn + Dr + V)           K·H·(Dn + Dr + V)
    absorbed    2·S·R·H·(Dn + V) + 2·P·H·(R + Dr + R)            K·(R + Dr) + S·H·(R + Dr + R)

and both read the latents. The number of batch elements is not in it, so that the choice is the same in any batch. A
kernel over latents may take longer for a flop than products and kernels over expanded keys do.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim

from ejkernel.primitives import multi_latent_page_attention as over_pages
from ejkernel.primitives._pages import CacheSpec
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import Backend, KernelConfig, Platform, Target, band, visible_pairs
from ejkernel.types.multi_latent_page_attention import MultiLatentPageAttentionConfig

from ._latents import named, product, statistics_dtype
from ._registry import configured_by, emits, kernel_registry, supported_if
from ._target import gpu_target

# Flops of a product in the time in which memory writes or reads a byte: between some 10 of a CPU and 200 of a GPU.
FLOPS_OF_A_BYTE = 64
MANY_HEADS = 2**20
# What kernels over pages take.
_TAKEN = ("q", "kv_latent", "k_rope", "w_kc", "w_vc", "sinks")


def absorbs(x: Operands, spec: FlashAttentionSpec, slower: float = 1.0) -> bool:
    """Whether the absorbed form of a call (arrays or shapes) costs less than the expanded one, by the count above.

    A flop of attention to the latents takes `slower` times as long as any other.
    """
    (_, queries, heads, features), (_, keys, latent) = x.q.shape, x.kv_latent.shape
    if any(map(is_symbolic_dim, (queries, heads, keys))):
        return False
    values = x.w_vc.shape[3]
    expanded, absorbed = features + values, latent + x.k_rope.shape[2] + latent
    pairs = visible_pairs(queries, keys, spec.causal, spec.window)

    def cost(projected: int, width: float, numbers: int) -> float:
        flops = projected * latent * (x.w_kc.shape[3] + values) + pairs * width
        return 2 * (heads * flops + FLOPS_OF_A_BYTE * x.q.dtype.itemsize * numbers)

    of_absorbed = keys * (absorbed - latent) + queries * heads * absorbed
    return cost(queries, slower * absorbed, of_absorbed) < cost(keys, expanded, keys * heads * expanded)


def absorbs_in_kernels(x: Operands, spec: FlashAttentionSpec, slower: float = 1.0) -> bool:
    """`absorbs`, counted for so many heads that what is written once for all of them is nothing beside the rest.

    A config is chosen for all heads, and the kernel that takes it for those of one device: the choice must not differ.
    """
    (batch, queries, _, features), dtype = x.q.shape, x.q.dtype
    return absorbs(x._replace(q=jax.ShapeDtypeStruct((batch, queries, MANY_HEADS, features), dtype)), spec, slower)


def forward(attend: Callable[..., Outputs], x: Operands, spec: FlashAttentionSpec, config: KernelConfig) -> Outputs:
    """o and lse, where `attend` is a forward of flash_attention whose q may have a wider dtype than k and v.

    So queries and results over latents are not rounded between the products.
    """
    one_head = lambda a: lax.expand_dims(a, (2,))
    q = jnp.concatenate(_in_latents(x), axis=-1)
    o, lse = attend(*x._replace(q=q).attention(one_head(_slots(x)), one_head(x.kv_latent)), spec=spec, config=config)
    return Outputs(_values(o, x), lse)


def _slots(x: Operands) -> Array:
    """The latents and rotary parts [c_j, r_j] of all positions, [b,t,c+y]."""
    return jnp.concatenate([x.kv_latent, x.k_rope], axis=-1)


def _in_latents(x: Operands) -> tuple[Array, Array]:
    """The parts n Wᵀ [b,s,h,c] and m [b,s,h,y] of queries over latents, in the dtype of statistics."""
    (axes, w), features = named(x.w_kc), x.w_kc.shape[3]
    latent = product(f"bshn,{axes}->bshc", x.q[..., :features], w)
    return latent, x.q[..., features:].astype(statistics_dtype(x.q))


def _values(o: Array, x: Operands) -> Array:
    """The values Σ_c o [b,s,h,c] · w_vc [b?,c,h,e] -> [b,s,h,e], in the dtype of q."""
    axes, w = named(x.w_vc.astype(o.dtype))
    return product(f"bshc,{axes}->bshn", o, w).astype(x.q.dtype)


# --- By kernels over pages --------------------------------------------------------------------------------------------


def register(
    module: str,
    latents: Any,
    rows: Callable[[Any], int],
    platform: Platform,
    backend: Backend,
    priority: int,
    slower: float = 1.0,
) -> None:
    """Registers the absorbed forward by a platform's multi_latent_page_attention, of the package `latents`.

    The latents of a batch element are its only page. Of a `KernelConfig`, block_q are the rows of a tile, heads of
    tokens, which `rows` tells of a config of the package; the splits of the keys are those that the package takes first
    with such a tile, or with the likeliest one. `slower` is what `absorbs_in_kernels` is told.
    """
    kernel = latents.multi_latent_page_attention

    def flash_mla(
        *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
    ) -> Outputs:
        """The results o and lse, by attention over the latents."""
        x = Operands(*operands)
        if wrong := excess(x, config):
            raise ValueError(f"flash_mla ({platform}): {wrong}")
        choices = kernel.space(_cache_spec(spec), _shapes(x), gpu_target())
        other = replace(_of_pages(config, x.q.shape[2]), num_splits=choices[0].num_splits)
        chosen = next((of for of in choices if tile(of) == tile_of(config)), other)
        o, lse = kernel(*_step(x), spec=_cache_spec(spec), config=chosen)
        return Outputs(_values(o, x), jnp.moveaxis(lse, 2, 1))

    def tile(of: MultiLatentPageAttentionConfig) -> tuple:
        return rows(of), of.keys_per_block, of.num_warps, of.num_stages, of.algorithm

    def tile_of(config: KernelConfig) -> tuple:
        return config.block_q, config.block_k, config.num_warps, config.num_stages, config.algorithm

    def space(spec: FlashAttentionSpec, x: Operands, target: Target) -> list[KernelConfig]:
        tiles = dict.fromkeys(map(tile, kernel.space(_cache_spec(spec), _shapes(x), target)))
        return [
            KernelConfig(
                block_q=block_q, block_k=block_k, num_warps=warps, num_stages=stages, algorithm=algorithm,
                platform=platform, backend=backend,
            )
            for block_q, block_k, warps, stages, algorithm in tiles
        ]  # fmt: skip

    def excess(x: Operands, config: KernelConfig) -> str | None:
        return kernel.excess(_shapes(x), _of_pages(config, x.q.shape[2])) if hasattr(kernel, "excess") else None

    def refuses(config: KernelConfig) -> str | None:
        wrong = kernel.refuses(_of_pages(config))
        return wrong and wrong.replace("heads_per_block", "block_q").replace("keys_per_block", "block_k")

    def supports(spec: FlashAttentionSpec, x: Operands, target: Target) -> str | None:
        if wrong := _refuses(spec, x, slower):
            return wrong
        wrong = kernel.supports(_cache_spec(spec), _shapes(x), target)
        return wrong and f"latents as pages: {wrong}"

    flash_mla.__module__, flash_mla.__qualname__, flash_mla.excess = module, flash_mla.__name__, excess
    configured_by(lambda *call: space(*call)[0], space, kernel.variants, refuses)(flash_mla)
    emits(*kernel.custom_calls)(supported_if(supports)(flash_mla))
    kernel_registry.register("flash_mla", platform, backend, priority)(flash_mla)


def _refuses(spec: FlashAttentionSpec, x: Operands, slower: float) -> str | None:
    """Why the call (arrays or shapes) is not one over pages, or None."""
    queries, keys = x.q.shape[1], x.kv_latent.shape[1]
    if not absorbs_in_kernels(x, spec, slower):
        return f"{queries} queries of {keys} keys: with keys and values of all heads the call costs less"
    if others := [name for name, a in x._asdict().items() if a is not None and name not in _TAKEN]:
        return f"{', '.join(others)}: the kernels over latents take sinks alone"
    if spec.batch_invariant:
        return "batch_invariant: the order of sums in the products with projections may depend on the batch size"
    left, right = band(spec.causal, spec.window)
    if right != 0 and (queries > 1 or (right or 0) < 0):
        return "not causal: the kernels over latents mask the keys after a query, and no others at the end"
    if left is not None and left < 0:
        return f"window {spec.window}: the kernels over latents need one that has the query's own key"
    if queries > keys:
        return f"{queries} queries of {keys} keys: the kernels over latents need a key for each"
    return None


def _cache_spec(spec: FlashAttentionSpec) -> CacheSpec:
    left = spec.window[0]
    return CacheSpec(window=None if left is None else left + 1, softcap=spec.softcap, softmax_scale=spec.softmax_scale)


def _of_pages(config: KernelConfig, heads: int = 1) -> MultiLatentPageAttentionConfig:
    """The config over pages with the tile of a config, of as many tokens as fit with these heads, without splits."""
    return MultiLatentPageAttentionConfig(
        queries_per_block=max(1, config.block_q // (1 << (heads - 1).bit_length())),
        heads_per_block=config.block_q,
        keys_per_block=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        algorithm=config.algorithm,
    )


def _shapes(x: Operands) -> over_pages.Operands:
    """The operands over pages as shapes: a batch element has one sequence, of one page."""
    (b, s, h, _), (_, t, c), y, of = x.q.shape, x.kv_latent.shape, x.k_rope.shape[2], jax.ShapeDtypeStruct
    arrays = ((b, s, h, c), (b, s, h, y), (b, 1, t, c + y))
    tables = ((b, 1), (b, 1, 1), (b, 2), (b, 1))
    return over_pages.Operands(
        *(of(shape, x.q.dtype) for shape in arrays), *(of(shape, jnp.int32) for shape in tables), x.sinks
    )


def _step(x: Operands) -> over_pages.Operands:
    """The operands over pages: the queries, rounded once, are the last tokens of the only sequence."""
    (b, s, _, _), t = x.q.shape, x.kv_latent.shape[1]
    rounded = (a.astype(x.q.dtype) for a in _in_latents(x))
    number = lambda *of: jnp.broadcast_to(jnp.array(of, jnp.int32), (b, len(of)))
    return over_pages.Operands(
        *rounded, _slots(x)[:, None], number(t), number(0)[..., None], number(0, s), number(1), x.sinks
    )
