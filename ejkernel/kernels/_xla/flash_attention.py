"""flash_attention in plain JAX: the formula, and its decomposition into tiles that every platform can run.

With z the scaled and biased logits, s = softcap·tanh(z / softcap) the capped ones, −∞ where masked, κ the factor of
dropout (0 or 1 / (1 − rate)) and σ the sinks:

    lse = log(Σ_j exp s_j + Σ_n exp σ_n)        p = exp(s − lse)        o = Σ_j κ_j p_j v_j

The decomposition visits the tiles of the logits that causal and window leave. The forward carries the running maximum m
of a row and, relative to it, the sum l and the weighted values (Milakov and Gimelshein, arXiv 1805.02867;
FlashAttention-2, arXiv 2307.08691). The backward and the tangent know lse, so a tile adds to sums and needs no other:

    δ = Σ_e do·o − dlse         ds = p (κ Σ_e do·v − δ)         dσ = −Σ_i exp(σ − lse_i) δ_i
    dz = ds (1 − (s / softcap)²)
    dq = scale Σ_j dz k         dk = scale Σ_i dz q             dv = Σ_i κ p do
    dbias = dz                  dscale = Σ_ij dz q·k

    ż = scale (q̇·k + q·k̇) + scalė q·k + biaṡ                   ṡ = ż (1 − (s / softcap)²)
    l̇se = Σ_j p ṡ + Σ_n exp(σ_n − lse) σ̇_n                     ȯ = Σ_j κ p (ṡ v + v̇) − o l̇se
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig

from .._registry import Backend, Platform, kernel_registry
from . import _attention as attention
from ._attention import (
    Folded,
    dropped,
    fold,
    fold_heads,
    fold_rows,
    over_columns,
    over_features,
    over_rows,
    unfold_rows,
)


def reference(*operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec()) -> Outputs:
    """The formula: products in the precision of the inputs, all else in float32, or float64 where the inputs are.

    Takes memory for all the logits. Differentiable to any order.
    """
    operands = Operands(*operands)
    x, _, _, s, _ = _logits(_folded(operands), spec)
    sinks = jnp.zeros((1, 1, 1, 0), s.dtype) if x.sinks is None else x.sinks.astype(s.dtype)
    m = jnp.maximum(s.max(-1, initial=-jnp.inf), sinks.max(-1, initial=-jnp.inf)[..., None])
    m = lax.stop_gradient(_finite(m))[..., None]
    l = jnp.exp(s - m).sum(-1, keepdims=True) + jnp.exp(sinks[..., None, :] - m).sum(-1, keepdims=True)
    p = jnp.exp(s - m) / _or_one(l)
    lse = jnp.where(l > 0, m + jnp.log(_or_one(l)), -jnp.inf)[..., 0]
    return _outputs(over_columns(dropped(p, x, spec), x.v), lse, operands.q.dtype)


class _Running(NamedTuple):
    """Of the keys seen so far: the largest logit of a row, and relative to it the sum and the weighted values."""

    m: Array
    l: Array
    o: Array


@kernel_registry.register("flash_attention", Platform.XLA, Backend.ANY)
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse, tile by tile."""
    operands = Operands(*operands)
    x, grid = attention.cut(_folded(operands), spec, config.block_q, config.block_k)

    @jax.checkpoint
    def of_tile(x, m, start):
        x, _, _, s, _ = _logits(attention.tile(x, start, grid.size), spec)
        m = lax.stop_gradient(jnp.maximum(m, s.max(-1)))
        p = jnp.exp(s - _finite(m)[..., None])
        return _Running(m, p.sum(-1), over_columns(dropped(p, x, spec), x.v))

    def step(running, start):
        old = attention.tile(running, start, grid.size)
        new = of_tile(x, lax.stop_gradient(old.m), start)
        shrink = jnp.exp(old.m - _finite(new.m))
        both = _Running(new.m, old.l * shrink + new.l, old.o * shrink[..., None] + new.o)
        return attention.put(running, both, start)

    running = attention.sweep(step, _before_any_key(x), grid)
    m, l, o = attention.tile(running, attention.ORIGIN, _shape(operands))
    lse = jnp.where(l > 0, m + jnp.log(_or_one(l)), -jnp.inf)
    return _outputs(o / _or_one(l)[..., None], lse, operands.q.dtype)


def _before_any_key(x: Folded) -> _Running:
    """Rows that have seen the sinks alone."""
    dtype, rows = attention.statistics_dtype(x.q.dtype), x.q.shape[:4]
    m, l, o = (attention.full(shape, 0, dtype, x) for shape in (rows, rows, (*rows, x.v.shape[-1])))
    if x.sinks is None:
        return _Running(m - jnp.inf, l, o)
    sinks = x.sinks.astype(dtype)
    largest = lax.stop_gradient(sinks.max(-1, keepdims=True))
    return _Running(m + largest, l + jnp.exp(sinks - _finite(largest)).sum(-1, keepdims=True), o)


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
    groups = primals.k.shape[2]
    o, lse = fold_rows(outputs.o, groups), fold_heads(outputs.lse, groups)
    x, grid = attention.cut(_folded(primals), spec, config.block_q, config.block_k)
    padding = x.q.shape[-2] - primals.q.shape[1], x.k.shape[-2] - primals.k.shape[1]
    dx, rows = attention.pad(fold(tangents, groups), padding), attention.pad(_Rows(lse), padding)

    def contribution(x, dx, rows):
        logits = _logits(x, spec)
        p = jnp.exp(logits.s - _finite(rows.lse)[..., None])
        weights = dropped(p, x, spec)
        dx = attention.zero_unseen(dx, logits.seen)
        do = [] if dx.v is None else [over_columns(weights, dx.v)]
        dlse = jnp.zeros_like(rows.lse)
        if _moves_logits(dx):
            ds = _logits_tangent(logits, dx, spec)
            do, dlse = [*do, over_columns(weights * ds, logits.x.v)], (p * ds).sum(-1)
        return {"do": sum(do), "dlse": dlse}

    shapes = {"do": (*x.q.shape[:4], x.v.shape[-1]), "dlse": x.q.shape[:4]}
    totals = {name: attention.full(shape, 0, lse.dtype, (x, dx)) for name, shape in shapes.items()}
    if dx.v is not None or _moves_logits(dx):
        totals = attention.accumulate(contribution, (x, dx, rows), totals, grid)
    totals = attention.tile(totals, attention.ORIGIN, _shape(primals))
    do, dlse = totals["do"], totals["dlse"]
    if dx.sinks is not None:
        dlse = dlse + (_sink_weights(x, lse) * dx.sinks[..., None, :]).sum(-1)
    return _outputs(do - o.astype(lse.dtype) * dlse[..., None], dlse, primals.q.dtype)


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
    groups = primals.k.shape[2]
    o, lse = fold_rows(outputs.o, groups), fold_heads(outputs.lse, groups)
    do = jnp.zeros_like(o) if cotangents.o is None else fold_rows(cotangents.o, groups)
    delta = (do.astype(lse.dtype) * o.astype(lse.dtype)).sum(-1)
    if cotangents.lse is not None:
        delta = delta - fold_heads(cotangents.lse, groups)
    x, grid = attention.cut(_folded(primals), spec, config.block_q, config.block_k)
    rows = attention.pad(_Rows(lse, delta, do), (x.q.shape[-2] - primals.q.shape[1], 0))
    like = {"dq": x.q, "dk": x.k.mT, "dv": x.v.mT, "dbias": x.bias, "dsoftmax_scale": x.softmax_scale}
    totals = {
        name: attention.full(a.shape, 0, lse.dtype, (x, rows))
        for name, a in like.items()
        if name.removeprefix("d") in wrt
    }

    def contribution(x, rows):
        logits = _logits(x, spec)
        x = logits.x
        p = jnp.exp(logits.s - _finite(rows.lse)[..., None])
        weights = dropped(p, x, spec)
        ds = weights * over_features(rows.do, x.v) - p * rows.delta[..., None]
        dz = ds if logits.slope is None else ds * logits.slope
        dz_scaled = dz if x.softmax_scale is None else dz * x.softmax_scale
        parts = {
            "dq": lambda: over_columns(dz_scaled, x.k),
            "dk": lambda: over_rows(x.q, dz_scaled),
            "dv": lambda: over_rows(rows.do, weights),
            "dbias": lambda: attention.sum_to(dz, x.bias.shape),
            "dsoftmax_scale": lambda: attention.sum_to(dz * logits.raw, x.softmax_scale.shape),
        }
        return {name: parts[name]() for name in totals}

    if totals:
        totals = attention.accumulate(contribution, (x, rows), totals, grid)
        totals = attention.tile(totals, attention.ORIGIN, _shape(primals))
    gradients = {
        "q": lambda: unfold_rows(totals["dq"] * spec.softmax_scale),
        "k": lambda: (totals["dk"] * spec.softmax_scale).transpose(0, 3, 1, 2),
        "v": lambda: totals["dv"].transpose(0, 3, 1, 2),
        "bias": lambda: totals["dbias"],
        "softmax_scale": lambda: totals["dsoftmax_scale"] * spec.softmax_scale,
        "sinks": lambda: attention.sum_to(-(_sink_weights(x, lse) * delta[..., None]).sum(3), x.sinks.shape),
    }
    return tuple(_in_form_of(getattr(primals, name), gradients[name]()) for name in wrt)


# --- The parts of the formula ----------------------------------------------------------------------------------------


class _Logits(NamedTuple):
    """Of a tile: its operands, q·k, ds/dz (None without softcap), s, and which logits count (None: all)."""

    x: Folded
    raw: Array
    slope: Array | None
    s: Array
    seen: Array | None


def _logits(x: Folded, spec: FlashAttentionSpec) -> _Logits:
    seen = attention.visible(x, spec)
    x = attention.zero_unseen(x, seen)
    raw = over_features(x.q, x.k)
    s, slope = raw * spec.softmax_scale, None
    if x.softmax_scale is not None:
        s = s * x.softmax_scale
    if x.bias is not None:
        s = s + x.bias
    if spec.softcap is not None:
        tanh = jnp.tanh(s / spec.softcap)
        s, slope = spec.softcap * tanh, 1 - tanh**2
    return _Logits(x, raw, slope, s if seen is None else jnp.where(seen, s, -jnp.inf), seen)


def _moves_logits(dx: Folded) -> bool:
    return any(a is not None for a in (dx.q, dx.k, dx.bias, dx.softmax_scale))


def _logits_tangent(logits: _Logits, dx: Folded, spec: FlashAttentionSpec) -> Array:
    """ṡ = (scale (q̇·k + q·k̇) + scalė q·k + biaṡ) ds/dz, where the logit counts or not."""
    x = logits.x
    products = [] if dx.q is None else [over_features(dx.q, x.k)]
    products += [] if dx.k is None else [over_features(x.q, dx.k)]
    terms = [] if dx.bias is None else [dx.bias]
    if products:
        terms.append(sum(products) * spec.softmax_scale * (1 if x.softmax_scale is None else x.softmax_scale))
    if dx.softmax_scale is not None:
        terms.append(logits.raw * spec.softmax_scale * dx.softmax_scale)
    return sum(terms) * (1 if logits.slope is None else logits.slope)


def _sink_weights(x: Folded, lse: Array) -> Array:
    """exp(σ − lse) [b,g,r,s,n]."""
    return jnp.exp(x.sinks.astype(lse.dtype)[..., None, :] - _finite(lse)[..., None])


def _finite(m: Array) -> Array:
    """m, or 0 where it is −∞ because nothing was seen: exp(−∞ − 0) = 0, while −∞ − (−∞) has no value."""
    return jnp.where(m == -jnp.inf, jnp.zeros((), m.dtype), m)


def _or_one(l: Array) -> Array:
    """l, or 1 where it is 0 because nothing was seen."""
    return jnp.where(l > 0, l, jnp.ones((), l.dtype))


# --- Between the two layouts -----------------------------------------------------------------------------------------


def _folded(operands: Operands) -> Folded:
    rows, columns = attention.tokens(operands)
    return fold(operands, operands.k.shape[2])._replace(rows=rows, columns=columns)


def _shape(operands: Operands) -> tuple[int, int]:
    """Rows and columns of the logits."""
    return operands.q.shape[1], operands.k.shape[1]


def _outputs(o: Array, lse: Array, dtype: Any) -> Outputs:
    b, g, r, s = lse.shape
    return Outputs(unfold_rows(o).astype(dtype), lse.reshape(b, g * r, s))


def _in_form_of(like: Array, gradient: Array) -> Array:
    return gradient.reshape(like.shape).astype(like.dtype)
