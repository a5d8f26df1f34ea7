"""flash_mla in plain JAX: flash_attention of the keys and values of all heads, which are made of the latents.

With c_j the latent of position j, r_j its rotary part, and the projections W of keys and U of values of a head h:

    k_jh = [c_j W_h, r_j]                                   v_jh = c_j U_h

The tangents of both follow by the product rule, and are given to the tangent of flash_attention:

    k̇_jh = [ċ_j W_h + c_j Ẇ_h, ṙ_j]                         v̇_jh = ċ_j U_h + c_j U̇_h

Its backward gives dk and dv, here in float32, with dk = [dn, dr] as k is divided; sums over heads and positions remain,

    dc_j = Σ_h (dn_jh W_hᵀ + dv_jh U_hᵀ)                    dr_j = Σ_h dr_jh
    dW_h = Σ_j c_jᵀ dn_jh                                   dU_h = Σ_j c_jᵀ dv_jh

which are rounded once, at the end. A position that no query sees has dn = dv = 0, but its latent may be NaN, and so
would be the product: tangent and backward take such a latent for 0.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from ejkernel.primitives import flash_attention as algorithm
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Outputs
from ejkernel.primitives.flash_mla import Operands
from ejkernel.types import KernelConfig, Target

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from . import _attention as attention
from . import _tiles as tiles
from . import flash_attention as flash
from ._batch import one_by_one


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why these functions do not keep what the spec promises, or None: as those of flash_attention."""
    return flash.supports(spec, operands.shapes(operands.q.dtype), target)


def heuristic(spec: FlashAttentionSpec, operands: Operands, target: Target) -> KernelConfig:
    """That of flash_attention."""
    return tiles.heuristic(spec, operands.shapes(operands.q.dtype), target)


def space(spec: FlashAttentionSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """That of flash_attention."""
    return tiles.space(spec, operands.shapes(operands.q.dtype), target)


def reference(*operands, spec=FlashAttentionSpec()) -> Outputs:
    """The formula: that of flash_attention, of the expanded keys and values."""
    return flash.reference(*expanded(Operands(*operands)), spec=spec)


def expanded(x: Operands) -> algorithm.Operands:
    """The operands of flash_attention: the keys [b,t,h,d] and the values [b,t,h,e] of every head.

    Tangent and backward make them again, and there exp(s − lse) is a weight only if s is that of the forward. So the
    products stand between barriers: XLA may sum them in another order together with what is around them, and some of
    the keys would be rounded to another number.
    """
    latent, w_kc, w_vc = lax.optimization_barrier((x.kv_latent, x.w_kc, x.w_vc))
    k, v = lax.optimization_barrier((_projected(latent, w_kc), _projected(latent, w_vc)))
    return x.attention(_with_rope(k, x.k_rope).astype(x.q.dtype), v.astype(x.q.dtype))


# --- The three primitives --------------------------------------------------------------------------------------------


@kernel_registry.register("flash_mla", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse."""
    operands = Operands(*operands)
    if spec.batch_invariant:
        alone = partial(flash_mla, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), operands, operands.q.shape[0]))
    return flash.forward(spec, *tiles.cut(expanded(operands), spec, config))


@kernel_registry.register("flash_mla_jvp", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(flash_mla_jvp, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), (primals, outputs, tangents), primals.q.shape[0]))
    visible = _visible_keys(primals, spec, config)
    primals, tangents = _without_hidden(primals, visible), _without_hidden(tangents, visible)
    x, grid = tiles.cut(expanded(primals), spec, config)
    return flash.tangent(outputs, _expanded_tangent(primals, tangents), spec, x, grid)


@kernel_registry.register("flash_mla_bwd", Platform.XLA, Backend.ANY)
@configured_by(heuristic, space)
@supported_if(supports)
def flash_mla_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(flash_mla_bwd, wrt=wrt, spec=replace(spec, batch_invariant=False), config=config)
        batch = primals.q.shape[0]
        summed = [n for n, name in enumerate(wrt) if getattr(primals, name).shape[0] < batch]
        return tuple(one_by_one(lambda x: alone(*x), (primals, outputs, cotangents), batch, summed))
    primals = _without_hidden(primals, _visible_keys(primals, spec, config))
    x, grid = tiles.cut(expanded(primals), spec, config)
    made_of = {"k": ("kv_latent", "k_rope", "w_kc"), "v": ("kv_latent", "w_vc")}
    asked = [name for name, of in made_of.items() if not set(of).isdisjoint(wrt)]
    asked = (*asked, *(name for name in wrt if name in algorithm.Operands._fields))
    wide = primals.shapes(attention.statistics_dtype(primals.q.dtype))
    found = dict(zip(asked, flash.backward(wide, outputs, cotangents, asked, spec, x, grid), strict=True))
    features = primals.w_kc.shape[3]
    latent, w_kc, w_vc = primals.kv_latent, primals.w_kc, primals.w_vc
    parts = {
        "kv_latent": lambda: _onto_latents(found["k"][..., :features], w_kc) + _onto_latents(found["v"], w_vc),
        "k_rope": lambda: found["k"][..., features:].sum(2),
        "w_kc": lambda: _onto_projection(latent, found["k"][..., :features], w_kc),
        "w_vc": lambda: _onto_projection(latent, found["v"], w_vc),
    }
    return tuple(parts[n]().astype(getattr(primals, n).dtype) if n in parts else found[n] for n in wrt)


def _expanded_tangent(x: Operands, dx: Operands) -> algorithm.Operands:
    """The tangents of the keys and values by the product rule; None where nothing of theirs moves."""

    def moved(w, dw):
        terms = [] if dx.kv_latent is None else [_projected(dx.kv_latent, w)]
        terms += [] if dw is None else [_projected(x.kv_latent, dw)]
        return sum(terms[1:], terms[0]) if terms else None

    dk, dv = moved(x.w_kc, dx.w_kc), moved(x.w_vc, dx.w_vc)
    if dk is not None or dx.k_rope is not None:
        (b, t, _), (h, features) = x.kv_latent.shape, x.w_kc.shape[2:]
        dtype = attention.statistics_dtype(x.q.dtype)
        dk = jnp.zeros((b, t, h, features), dtype) if dk is None else dk
        dk = _with_rope(dk, jnp.zeros_like(x.k_rope) if dx.k_rope is None else dx.k_rope)
    return dx.attention(*(None if a is None else a.astype(x.q.dtype) for a in (dk, dv)))


# --- Positions that no query sees -------------------------------------------------------------------------------------


def _visible_keys(x: Operands, spec: FlashAttentionSpec, config: KernelConfig) -> Array | None:
    """[b,t,1] bool: the positions that some query of some head sees; None where all are."""
    latents = x.kv_latent[:, :, None]  # as the keys of one head, which all heads share
    attends = algorithm.Operands(
        x.q, latents, latents, mask=x.mask, q_segment_ids=x.q_segment_ids, kv_segment_ids=x.kv_segment_ids
    )
    folded, grid = tiles.cut(attends, spec, config)
    if folded.mask is None and folded.rows.segment is None and folded.columns.hidden is None:
        return None

    def of_tile(x):
        columns = attention.alive(x, attention.visible(x)).columns
        return {"k": jnp.broadcast_to(columns, (*x.k.shape[:3], 1))}

    either = lambda a, b: {"k": a["k"] | b["k"]}
    visible = grid.sweep(of_tile, (folded,), either, lambda: {"k": jnp.zeros((*folded.k.shape[:3], 1), bool)})
    return tiles.trim(visible, grid)["k"][:, 0]


def _without_hidden(x: Operands, visible: Array | None) -> Operands:
    """The operands, or their tangents, with latents of 0 where no query sees them."""
    if visible is None or x.kv_latent is None:
        return x
    return x._replace(kv_latent=attention.where(visible, x.kv_latent, 0))


# --- Products --------------------------------------------------------------------------------------------------------


def _with_rope(k: Array, rope: Array) -> Array:
    """[b,t,h,x] and [b,t,y] -> [b,t,h,d]: every head has the one rotary part."""
    rope = jnp.broadcast_to(rope[:, :, None], (*k.shape[:3], rope.shape[2]))
    return jnp.concatenate([k, rope.astype(k.dtype)], axis=-1)


def _projected(latent: Array, w: Array) -> Array:
    """Σ_c latent [b,t,c] · w [b?,c,h,n] -> [b,t,h,n]."""
    axes, w = _named(w)
    return _product(f"btc,{axes}->bthn", latent, w)


def _onto_latents(da: Array, w: Array) -> Array:
    """Σ_{h,n} da [b,t,h,n] · w [b?,c,h,n] -> [b,t,c]."""
    axes, w = _named(w.astype(da.dtype))
    return _product(f"bthn,{axes}->btc", da, w)


def _onto_projection(latent: Array, da: Array, w: Array) -> Array:
    """Σ_t latent [b,t,c] · da [b,t,h,n] -> [b?,c,h,n], as w is: over the batch too if that shares the projection.

    The product that JAX makes when it transposes `_projected`, da first: on a CPU, XLA sums some products the other way
    round one term after the other, and errs twice as much.
    """
    axes, _ = _named(w)
    transposed = axes.replace("c", "") + "c"
    dw = _product(f"bthn,btc->{transposed}", da, latent.astype(da.dtype))
    return jnp.moveaxis(dw, -1, -3).reshape(w.shape)


def _named(w: Array) -> tuple[str, Array]:
    """The axes of a projection, and it without that of the batch if all of that share it."""
    return ("chn", w[0]) if w.shape[0] == 1 else ("bchn", w)


def _product(axes: str, x: Array, y: Array) -> Array:
    """In the dtype of statistics; float32 in full on every platform."""
    return jnp.einsum(axes, x, y, precision="highest", preferred_element_type=attention.statistics_dtype(x.dtype))
