"""flash_attention in plain JAX: the formula, and its decomposition into tiles that every platform can run.

With z the scaled and biased logits, s = softcap·tanh(z / softcap) the capped ones, −∞ where masked, κ the factor of
dropout (0 or 1 / (1 − rate)) and σ the sinks:

    lse = log(Σ_j exp s_j + Σ_n exp σ_n)        p = exp(s − lse)        o = Σ_j κ_j p_j v_j

The decomposition computes the tiles of the logits that causality and window leave. In the forward, a tile gives the
largest logit m of each row and, relative to it, the sum l and the weighted values; the tiles of a row are merged
(Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691). Backward and tangent are given lse up to
its rounding error, which they compute in a loop like that of the forward; then they sum over tiles:

    δ = Σ_e do·o − dlse         ds = p (κ Σ_e do·v − δ)         dσ = −Σ_i exp(σ − lse_i) δ_i
    dz = ds (1 − (s / softcap)²)
    dq = scale Σ_j dz k         dk = scale Σ_i dz q             dv = Σ_i κ p do
    dbias = dz                  dscale = Σ_ij dz q·k

    ż = scale (q̇·k + q·k̇) + scalė q·k + biaṡ                   ṡ = ż (1 − (s / softcap)²)
    l̇se = Σ_j p ṡ + Σ_n exp(σ_n − lse) σ̇_n                     ȯ = Σ_j κ p (ṡ v + v̇) − o l̇se

All of these are sums over keys, apart from lse and o: a split of the keys gives its terms of them in one loop, from the
lse and o of all splits.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target
from ejkernel.xla_utils.symbolic import is_symbolic

from .._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from . import _attention as attention
from . import _tiles as tiles
from ._attention import (
    Folded,
    dropped,
    over_columns,
    over_features,
    over_row,
    over_rows,
    scaled,
    unfold_columns,
    unfold_rows,
)
from ._batch import one_by_one
from ._logits import logits_of, logits_tangent, sink_weights, weights
from ._rows import Rows, fold_outputs, rows_of_backward
from ._softmax import (
    Softmax,
    at_least_lowest,
    excess_and_mean,
    lse_of,
    merged,
    not_zero,
    of_nothing,
    of_rows,
    relative_to_lse,
)


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why these functions cannot keep what the spec promises, or None."""
    if spec.batch_invariant and operands.cu_seqlens_q is not None:
        return "batch_invariant: where tiles begin within a packed sequence depends on the sequences before it"
    if spec.batch_invariant and is_symbolic(operands.q):
        return "batch_invariant computes batch elements one by one, which needs static sizes"
    return None


def reference(*operands, spec=FlashAttentionSpec()) -> Outputs:
    """The formula: products are in the precision of the inputs, all else in float32, or in float64 if these are.

    It needs memory for all the logits, and is differentiable to any order.
    """
    operands = Operands(*operands)
    x, _, _, s, *_ = logits_of(attention.folded(operands, spec), spec, operands.q.dtype)
    if x.sinks is not None:
        sinks = attention.sinks_of_rows(x, s.dtype)
        s = jnp.concatenate([s, jnp.broadcast_to(sinks, (*s.shape[:-1], sinks.shape[-1]))], axis=-1)
    m = lax.stop_gradient(at_least_lowest(s.max(-1, keepdims=True, initial=-np.inf)))
    weights = jnp.exp(s - m)
    l = weights.sum(-1, keepdims=True)
    p = (weights / not_zero(l))[..., : x.k.shape[2]]
    return _outputs(over_columns(dropped(p, x, spec), x.v), lse_of(m, l), operands.q.dtype)


# --- Forward ---------------------------------------------------------------------------------------------------------


@kernel_registry.register("flash_attention", Platform.XLA, Backend.ANY)
@configured_by(tiles.heuristic, tiles.space)
@supported_if(supports)
def flash_attention(
    *operands: Array | None, spec: FlashAttentionSpec = FlashAttentionSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and lse, tile by tile."""
    operands = Operands(*operands)
    if spec.batch_invariant:
        alone = partial(flash_attention, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), operands, operands.q.shape[0]))
    return forward(spec, *tiles.cut(operands, spec, config))


def forward(spec: FlashAttentionSpec, x: Folded, grid: tiles.Grid) -> Outputs:
    """o and lse of operands that are cut into the tiles of a grid."""
    dtype = attention.statistics_dtype(x.q.dtype)

    def of_tile(x):
        x, _, _, s, *_ = logits_of(x, spec)
        m = over_row(lax.reduce_max, s)
        m = lax.stop_gradient(at_least_lowest(m) if attention.hides(x) else m)
        p = lax.exp(lax.sub(s, m))
        return Softmax(m, over_row(lax.reduce_sum, p), over_columns(dropped(p, x, spec), x.v))

    softmax = grid.sweep(of_tile, (x,), merged, partial(of_nothing, x, dtype, x.v.shape[-1]))
    if x.sinks is not None:
        sinks = attention.sinks_of_rows(x, dtype)
        m = lax.stop_gradient(at_least_lowest(sinks.max(-1, keepdims=True)))
        softmax = merged(softmax, Softmax(m, jnp.exp(sinks - m).sum(-1, keepdims=True), 0.0))
    m, l, o = tiles.trim(softmax, grid)
    if attention.hides(x) or grid.shape[1] == 0:
        return _outputs(lax.div(o, not_zero(l)), lse_of(m, l), x.q.dtype)
    return _outputs(lax.div(o, l), lax.add(m, lax.log(l)), x.q.dtype)


# --- Tangent and backward --------------------------------------------------------------------------------------------


@kernel_registry.register("flash_attention_jvp", Platform.XLA, Backend.ANY)
@configured_by(tiles.heuristic, tiles.space)
@supported_if(supports)
def flash_attention_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: FlashAttentionSpec = FlashAttentionSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and lse; a tangent of None is zero."""
    if spec.batch_invariant:
        alone = partial(flash_attention_jvp, spec=replace(spec, batch_invariant=False), config=config)
        return Outputs(*one_by_one(lambda x: alone(*x), (primals, outputs, tangents), primals.q.shape[0]))
    return tangent(outputs, tangents, spec, *tiles.cut(primals, spec, config))


def tangent(outputs: Outputs, tangents: Operands, spec: FlashAttentionSpec, x: Folded, grid: tiles.Grid) -> Outputs:
    """The tangents of o and lse of operands that are cut into the tiles of a grid."""
    dx = tiles.pad(attention.fold(tangents, x.q.shape[1]), grid.padding)
    if spec.split:
        return _tangent_of_split(dx, spec, x, fold_outputs(outputs, x, grid), grid)
    lse = lax.stop_gradient(at_least_lowest(fold_outputs(outputs, x, grid).lse))

    def sums(x, dx, rows):
        logits = logits_of(x, spec)
        m, p = relative_to_lse(logits.s, rows.lse)
        ds = logits_tangent(logits, dx, spec)
        return Softmax(m, over_row(lax.reduce_sum, p), over_row(lax.reduce_sum, lax.mul(p, ds)))

    def change(x, dx, rows):
        logits = logits_of(x, spec)
        p = dropped(weights(logits.s, rows.lse, rows.excess), x, spec)
        do = over_columns(p * (logits_tangent(logits, dx, spec) - rows.dlse), logits.x.v)
        return {"do": do if dx.v is None else do + over_columns(p, attention.zero_fully_masked(dx, logits.living).v)}

    totals = grid.sweep(sums, (x, dx, Rows(lse)), merged, partial(of_nothing, x, lse.dtype, 1))
    excess, dlse = excess_and_mean(totals, x, lse)
    if dx.sinks is not None:
        dlse = dlse + (sink_weights(x, lse, excess) * dx.sinks.astype(lse.dtype)).sum(-1, keepdims=True)
    rows = Rows(lse, excess, dlse=dlse)
    nothing = lambda: {"do": of_rows(x, lse.dtype, x.v.shape[-1])}
    do = grid.sweep(change, (x, dx, rows), _added, nothing)["do"]
    return _outputs(**tiles.trim({"o": do, "lse": dlse}, grid), dtype=x.q.dtype)


def _tangent_of_split(dx: Folded, spec: FlashAttentionSpec, x: Folded, of_all: Outputs, grid: tiles.Grid) -> Outputs:
    """The terms of these keys in the tangents of o and lse of all splits."""
    lse = at_least_lowest(of_all.lse)

    def change(x, dx, rows):
        logits = logits_of(x, spec)
        p, ds = weights(logits.s, rows.lse, None), logits_tangent(logits, dx, spec)
        kept = dropped(p, x, spec)
        do = over_columns(kept * ds, logits.x.v)
        if dx.v is not None:
            do = do + over_columns(kept, attention.zero_fully_masked(dx, logits.living).v)
        return {"do": do, "dlse": over_row(lax.reduce_sum, lax.mul(p, ds))}

    nothing = lambda: {"do": of_rows(x, lse.dtype, x.v.shape[-1]), "dlse": of_rows(x, lse.dtype, 1)}
    found = grid.sweep(change, (x, dx, Rows(lse)), _added, nothing)
    do, dlse = found["do"], found["dlse"]
    if dx.sinks is not None:
        dlse = dlse + (sink_weights(x, lse, None) * dx.sinks.astype(lse.dtype)).sum(-1, keepdims=True)
    do = do - of_all.o.astype(lse.dtype) * dlse
    return _outputs(**tiles.trim({"o": do, "lse": dlse}, grid), dtype=x.q.dtype)


@kernel_registry.register("flash_attention_bwd", Platform.XLA, Backend.ANY)
@configured_by(tiles.heuristic, tiles.space)
@supported_if(supports)
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
    if spec.batch_invariant:
        alone = partial(flash_attention_bwd, wrt=wrt, spec=replace(spec, batch_invariant=False), config=config)
        batch = primals.q.shape[0]
        summed = [n for n, name in enumerate(wrt) if getattr(primals, name).shape[0] < batch]
        return tuple(one_by_one(lambda x: alone(*x), (primals, outputs, cotangents), batch, summed))
    return backward(primals, outputs, cotangents, wrt, spec, *tiles.cut(primals, spec, config))


def backward(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    wrt: tuple[str, ...],
    spec: FlashAttentionSpec,
    x: Folded,
    grid: tiles.Grid,
) -> tuple[Array, ...]:
    """The cotangents of the operands named in `wrt`; x are the operands cut into the tiles of a grid."""
    rows = rows_of_backward(outputs, cotangents, x, spec, grid)
    (b, g, _, _, d), (t, e) = x.q.shape, x.v.shape[2:]
    shapes = {"q": x.q.shape, "k": (b, g, d, t), "v": (b, g, e, t)}
    shapes |= {name: getattr(x, name).shape for name in ("bias", "softmax_scale") if name in wrt}
    shapes = {"d" + name: shape for name, shape in shapes.items() if name in wrt}
    nothing = lambda: {name: lax.full(shape, 0, rows.lse.dtype) for name, shape in shapes.items()}

    def gradients(x, rows):
        x, raw, slope, s, living, _ = logits_of(x, spec)
        do, delta = (attention.zero_where_masked(living.rows, a) for a in (rows.do, rows.delta))
        p = weights(s, rows.lse, rows.excess)
        after_dropout = dropped(p, x, spec)
        ds = lax.sub(lax.mul(after_dropout, over_features(do, x.v)), lax.mul(p, delta))
        dz = ds if slope is None else ds * slope
        scaled = dz if x.softmax_scale is None else dz * x.softmax_scale.astype(dz.dtype)
        parts = {
            "dq": lambda: over_columns(scaled, x.k),
            "dk": lambda: over_rows(x.q, scaled),
            "dv": lambda: over_rows(do, after_dropout),
            "dbias": lambda: attention.sum_to(dz, x.bias.shape),
            "dsoftmax_scale": lambda: attention.sum_to(dz * raw, x.softmax_scale.shape),
        }
        return {name: parts[name]() for name in shapes}

    totals = tiles.trim(grid.sweep(gradients, (x, rows), _added, nothing), grid) if shapes else {}
    if "sinks" in wrt:
        dsinks = -sink_weights(x, rows.lse, rows.excess) * rows.delta
        totals["dsinks"] = attention.sum_to(dsinks.sum(3, keepdims=True), x.sinks.shape)
    for name in ("q", "k", "softmax_scale"):  # in an order that is the same in every process, as caches need it
        if name in wrt:
            totals["d" + name] = scaled(totals["d" + name], spec.softmax_scale)
    columns = partial(unfold_columns, groups=x.k.shape[1])
    unfold = {"q": unfold_rows, "k": columns, "v": columns}
    like = {name: getattr(primals, name) for name in wrt}
    return tuple(
        lax.convert_element_type(lax.reshape(unfold.get(name, _as_it_is)(totals["d" + name]), x.shape), x.dtype)
        for name, x in like.items()
    )


def _added(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    return {name: lax.add(a[name], b[name]) for name in a}


# --- Between the layouts ---------------------------------------------------------------------------------------------


def _outputs(o: Array, lse: Array, dtype: Any) -> Outputs:
    b, g, r, s, _ = lse.shape
    return Outputs(lax.convert_element_type(unfold_rows(o), dtype), lax.reshape(lse, (b, g * r, s)))


def _as_it_is(x: Array) -> Array:
    return x
