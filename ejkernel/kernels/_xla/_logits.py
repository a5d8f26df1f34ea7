"""The logits of tiles of flash_attention in plain JAX, their tangents, and the weights."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ejkernel.primitives.flash_attention import FlashAttentionSpec

from . import _attention as attention
from ._attention import Folded, over_features, scaled
from ._softmax import at_least_lowest


class Logits(NamedTuple):
    """The logits of a tile, and the values that they are computed from.

    Attributes:
        x: the operands, with fully masked rows and columns of 0.
        raw: q·k.
        slope: ds/dz, None without softcap.
        s: the logits, −∞ where they are masked.
        living: which rows and columns are not fully masked.
        visible: which logits are not masked, None if nothing is.
    """

    x: Folded
    raw: Array
    slope: Array | None
    s: Array
    living: attention.Living
    visible: Array | None


def logits_of(x: Folded, spec: FlashAttentionSpec, product: Any = None) -> Logits:
    """The logits, from q·k in the dtype `product`, by default that of statistics."""
    visible = attention.visible(x)
    living = attention.alive(x, visible)
    x, dtype = attention.zero_fully_masked(x, living), attention.statistics_dtype(x.q.dtype)
    raw = lax.convert_element_type(over_features(x.q, x.k, product), dtype)
    s, slope = scaled(raw, spec.softmax_scale), None
    if x.softmax_scale is not None:
        s = s * x.softmax_scale.astype(dtype)
    if x.bias is not None:
        s = at_least_lowest(s) + x.bias.astype(dtype)  # rounded before the sum wherever XLA computes it, as below
    if spec.softcap is not None:
        if x.bias is not None and visible is not None:
            s = attention.where(visible, s, 0)  # a masked bias may be NaN, and would make the slope NaN
        tanh = jnp.tanh(s / spec.softcap)
        s, slope = spec.softcap * tanh, 1 - tanh**2
    if visible is not None:
        s = attention.where(visible, s, -np.inf)
    elif x.bias is None:
        # This changes no logit. But where XLA recomputes s, it would fuse q·k · scale with a subtraction, without
        # rounding the product, and exp(s − m) of the largest s would be far from 1.
        s = at_least_lowest(s)
    return Logits(x, raw, slope, s, living, visible)


def logits_tangent(logits: Logits, dx: Folded, spec: FlashAttentionSpec) -> Array:
    """ṡ = (scale (q̇·k + q·k̇) + scalė q·k + biaṡ) ds/dz; for masked logits it is arbitrary, but not NaN."""
    x, dx, dtype = logits.x, attention.zero_fully_masked(dx, logits.living), logits.s.dtype
    products = [] if dx.q is None else [over_features(dx.q, x.k)]
    products += [] if dx.k is None else [over_features(x.q, dx.k)]
    scale = 1 if x.softmax_scale is None else x.softmax_scale.astype(dtype)
    terms = [sum(products) * spec.softmax_scale * scale] if products else []
    if dx.softmax_scale is not None:
        terms.append(logits.raw * spec.softmax_scale * dx.softmax_scale.astype(dtype))
    if dx.bias is not None:
        bias = dx.bias if logits.visible is None else jnp.where(logits.visible, dx.bias, 0)
        terms.append(bias.astype(dtype))
    return sum(terms, jnp.zeros_like(logits.s)) * (1 if logits.slope is None else logits.slope)


def weights(s: Array, lse: Array, excess: Array | None) -> Array:
    """p = exp(s − lse − excess); excess, the smaller one, is subtracted last.

    Without excess, whose rows have keys in other splits too, p is at most 1: only rounding makes s exceed lse, for
    logits near 10⁹ by 64.
    """
    exponent = lax.sub(s, lse)
    if excess is None:
        excess = lax.stop_gradient(lax.max(exponent, np.zeros((), exponent.dtype)))
    return lax.exp(lax.sub(exponent, excess))


def sink_weights(x: Folded, lse: Array, excess: Array | None) -> Array:
    """exp(σ − lse) [b,g,r,s,n]."""
    return weights(attention.sinks_of_rows(x, lse.dtype), lse, excess)
