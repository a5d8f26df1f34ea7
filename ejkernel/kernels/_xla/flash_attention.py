"""flash_attention in plain JAX: the formula, and its decomposition into tiles that every platform can run.

With z the scaled and biased logits, s = softcap·tanh(z / softcap) the capped ones, −∞ where masked, κ the factor of
dropout (0 or 1 / (1 − rate)) and σ the sinks:

    lse = log(Σ_j exp s_j + Σ_n exp σ_n)        p = exp(s − lse)        o = Σ_j κ_j p_j v_j

The decomposition visits the tiles of the logits that causal and window leave. In the forward, a tile gives the largest
logit m of each row and, relative to it, the sum l and the weighted values; the tiles of a row are merged (Milakov and
Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Backward and tangent know lse; their tiles add up:

    δ = Σ_e do·o − dlse         ds = p (κ Σ_e do·v − δ)         dσ = −Σ_i exp(σ − lse_i) δ_i
    dz = ds (1 − (s / softcap)²)
    dq = scale Σ_j dz k         dk = scale Σ_i dz q             dv = Σ_i κ p do
    dbias = dz                  dscale = Σ_ij dz q·k

    ż = scale (q̇·k + q·k̇) + scalė q·k + biaṡ                   ṡ = ż (1 − (s / softcap)²)
    l̇se = Σ_j p ṡ + Σ_n exp(σ_n − lse) σ̇_n                     ȯ = Σ_j κ p (ṡ v + v̇) − o l̇se
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._registry import Backend, Platform, kernel_registry
from . import _attention as attention
from ._attention import Folded, dropped, fold_heads, fold_rows, over_columns, over_features, over_rows, unfold_rows


def reference(*operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec()) -> Outputs:
    """The formula: products in the precision of the inputs, all else in float32, or float64 where the inputs are.

    Takes memory for all the logits. Differentiable to any order.
    """
    operands = Operands(*operands)
    x, _, _, s, _ = _logits(attention.folded(operands, spec), spec)
    if x.sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(x.sinks, (*s.shape[:-1], x.sinks.shape[-1]))], axis=-1)
    m = lax.stop_gradient(s.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(s - _floored(m))
    l = _not_zero(weights.sum(-1, keepdims=True))
    p = (weights / l)[..., : x.k.shape[2]]
    return _outputs(over_columns(dropped(p, x, spec), x.v), m + jnp.log(l), operands.q.dtype)


# --- Forward ---------------------------------------------------------------------------------------------------------


class _Softmax(NamedTuple):
    """Of some of the logits of each row: the largest, and relative to it the sum of exp and the weighted values."""

    m: Array
    l: Array
    o: Array | float


@kernel_registry.register("flash_attention", Platform.XLA, Backend.ANY)
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse, tile by tile."""
    operands = Operands(*operands)
    x, grid = attention.cut(operands, spec, config.block_q, config.block_k)
    rows, dtype = x.q.shape[:4], attention.statistics_dtype(x.q.dtype)

    def of_tile(x):
        x, _, _, s, _ = _logits(x, spec)
        m = lax.stop_gradient(s.max(-1, keepdims=True))
        p = jnp.exp(s - _floored(m))
        return _Softmax(m, p.sum(-1, keepdims=True), over_columns(dropped(p, x, spec), x.v))

    nothing = _Softmax(*(lax.full((*rows, n), value, dtype) for n, value in ((1, -np.inf), (1, 0), (x.v.shape[-1], 0))))
    softmax = attention.sweep(of_tile, (x,), _merged, nothing, grid)
    if x.sinks is not None:
        sinks = x.sinks.astype(dtype)
        m = lax.stop_gradient(sinks.max(-1, keepdims=True))
        softmax = _merged(softmax, _Softmax(m, jnp.exp(sinks - _floored(m)).sum(-1, keepdims=True), 0.0))
    l = _not_zero(softmax.l)
    return _outputs(softmax.o / l, softmax.m + jnp.log(l), operands.q.dtype)


def _merged(a: _Softmax, b: _Softmax) -> _Softmax:
    m = jnp.maximum(a.m, b.m)
    shrink_a, shrink_b = jnp.exp(a.m - _floored(m)), jnp.exp(b.m - _floored(m))
    return _Softmax(m, a.l * shrink_a + b.l * shrink_b, a.o * shrink_a + b.o * shrink_b)


# --- Tangent and backward --------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """What the forward and the cotangents say of the rows."""

    lse: Array
    delta: Array | None = None
    do: Array | None = None


@kernel_registry.register("flash_attention_jvp", Platform.XLA, Backend.ANY)
def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    x, grid = attention.cut(primals, spec, config.block_q, config.block_k)
    dx = attention.pad(attention.fold(tangents, primals.k.shape[2]), grid.padding)
    o, lse = _fold_outputs(outputs, primals)
    moves_logits = any(a is not None for a in (dx.q, dx.k, dx.bias, dx.softmax_scale))

    def of_tile(x, dx, rows):
        logits = _logits(x, spec)
        dx = attention.zero_dead(dx, logits.living)
        p = jnp.exp(logits.s - _floored(rows.lse))
        weights = dropped(p, x, spec)
        do = 0 if dx.v is None else over_columns(weights, dx.v)
        if not moves_logits:
            return {"do": do}
        ds = _logits_tangent(logits, dx, spec)
        return {"do": do + over_columns(weights * ds, logits.x.v), "dlse": (p * ds).sum(-1, keepdims=True)}

    widths = ({"do": x.v.shape[-1]} if moves_logits or dx.v is not None else {}) | ({"dlse": 1} if moves_logits else {})
    nothing = {name: lax.full((*x.q.shape[:4], n), 0, lse.dtype) for name, n in widths.items()}
    rows = attention.pad(_Rows(lse), grid.padding)
    change = attention.sweep(of_tile, (x, dx, rows), _added, nothing, grid) if nothing else {}
    do, dlse = change.get("do", 0), change.get("dlse", jnp.zeros_like(lse))
    if dx.sinks is not None:
        dlse = dlse + (jnp.exp(x.sinks - _floored(lse)) * dx.sinks).sum(-1, keepdims=True)
    return _outputs(do - o.astype(lse.dtype) * dlse, dlse, primals.q.dtype)


@kernel_registry.register("flash_attention_bwd", Platform.XLA, Backend.ANY)
def flash_attention_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    x, grid = attention.cut(primals, spec, config.block_q, config.block_k)
    o, lse = _fold_outputs(outputs, primals)
    do, dlse = _fold_outputs(cotangents, primals)
    do = jnp.zeros_like(o) if do is None else do
    delta = (do.astype(lse.dtype) * o.astype(lse.dtype)).sum(-1, keepdims=True)
    delta = delta if dlse is None else delta - dlse

    def of_tile(x, rows):
        x, raw, slope, s, _ = _logits(x, spec)
        p = jnp.exp(s - _floored(rows.lse))
        weights = dropped(p, x, spec)
        ds = weights * over_features(rows.do, x.v) - p * rows.delta
        dz = ds if slope is None else ds * slope
        scaled = dz if x.softmax_scale is None else dz * x.softmax_scale
        gradients = {
            "dq": lambda: over_columns(scaled, x.k),
            "dk": lambda: over_rows(x.q, scaled),
            "dv": lambda: over_rows(rows.do, weights),
            "dbias": lambda: attention.sum_to(dz, x.bias.shape),
            "dsoftmax_scale": lambda: attention.sum_to(dz * raw, x.softmax_scale.shape),
        }
        return {name: gradients[name]() for name in nothing}

    (b, g, _, _, d), (t, e) = x.q.shape, x.v.shape[2:]
    shapes = {"dq": x.q.shape, "dk": (b, g, d, t), "dv": (b, g, e, t)}
    shapes |= {"d" + name: getattr(x, name).shape for name in ("bias", "softmax_scale") if name in wrt}
    nothing = {name: lax.full(shape, 0, lse.dtype) for name, shape in shapes.items() if name[1:] in wrt}
    rows = attention.pad(_Rows(lse, delta, do), grid.padding)
    totals = attention.sweep(of_tile, (x, rows), _added, nothing, grid) if nothing else {}

    def gradient(name):
        if name == "sinks":
            return attention.sum_to(-jnp.exp(x.sinks - _floored(lse)) * delta, x.sinks.shape)
        total = totals["d" + name] * (spec.softmax_scale if name in ("q", "k", "softmax_scale") else 1)
        return {"q": unfold_rows, "k": _unfold_columns, "v": _unfold_columns}.get(name, lambda x: x)(total)

    like = {name: getattr(primals, name) for name in wrt}
    return tuple(gradient(name).reshape(x.shape).astype(x.dtype) for name, x in like.items())


def _added(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    return {name: a[name] + b[name] for name in a}


# --- The parts of the formula ----------------------------------------------------------------------------------------


class _Logits(NamedTuple):
    """The operands without dead rows and columns, and which live; q·k; ds/dz, None without softcap; s."""

    x: Folded
    raw: Array
    slope: Array | None
    s: Array
    living: tuple[Array, Array] | None


def _logits(x: Folded, spec: FlashAttentionSpec) -> _Logits:
    seen = attention.visible(x, spec)
    living = attention.alive(x, seen)
    x = attention.zero_dead(x, living)
    raw = over_features(x.q, x.k)
    s, slope = raw * spec.softmax_scale, None
    if x.softmax_scale is not None:
        s = s * x.softmax_scale
    if x.bias is not None:
        s = s + x.bias
    if spec.softcap is not None:
        tanh = jnp.tanh(s / spec.softcap)
        s, slope = spec.softcap * tanh, 1 - tanh**2
    return _Logits(x, raw, slope, s if seen is None else attention.where(seen, s, -np.inf), living)


def _logits_tangent(logits: _Logits, dx: Folded, spec: FlashAttentionSpec) -> Array:
    """ṡ = (scale (q̇·k + q·k̇) + scalė q·k + biaṡ) ds/dz, as if nothing were masked."""
    x, terms = logits.x, []
    products = [] if dx.q is None else [over_features(dx.q, x.k)]
    products += [] if dx.k is None else [over_features(x.q, dx.k)]
    if products:
        terms.append(sum(products) * spec.softmax_scale * (1 if x.softmax_scale is None else x.softmax_scale))
    terms += [] if dx.softmax_scale is None else [logits.raw * spec.softmax_scale * dx.softmax_scale]
    terms += [] if dx.bias is None else [dx.bias]
    return sum(terms) * (1 if logits.slope is None else logits.slope)


def _floored(m: Array) -> Array:
    """m, or the lowest number for −∞, where nothing was seen: then exp(s − m) is 0 and not exp(−∞ + ∞)."""
    return lax.max(m, np.array(jnp.finfo(m.dtype).min, m.dtype))


def _not_zero(l: Array) -> Array:
    """l, which is at least 1, or a tiny number where nothing was seen: 0 / l is 0 and −∞ + log(l) is −∞."""
    return lax.max(l, np.array(jnp.finfo(l.dtype).tiny, l.dtype))


# --- Between the layouts ---------------------------------------------------------------------------------------------


def _fold_outputs(outputs: Outputs, operands: Operands) -> Outputs:
    groups = operands.k.shape[2]
    return Outputs(
        None if outputs.o is None else fold_rows(outputs.o, groups),
        None if outputs.lse is None else lax.expand_dims(fold_heads(outputs.lse, groups), (4,)),
    )


def _outputs(o: Array, lse: Array, dtype: Any) -> Outputs:
    b, g, r, s, _ = lse.shape
    return Outputs(unfold_rows(o).astype(dtype), lse.reshape(b, g * r, s))


def _unfold_columns(x: Array) -> Array:
    """[b,g,d,t] -> [b,t,g,d]."""
    return x.transpose(0, 3, 1, 2)
