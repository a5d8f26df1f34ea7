"""The softmax of rows whose logits are computed tile by tile, as partial softmaxes that are merged."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _attention as attention
from ._attention import Folded, over_row

# The largest exponent: above it, sums of exponentials, which derivatives square, may overflow or underflow.
_LARGE_EXPONENT = 20.0


class Softmax(NamedTuple):
    """The partial softmax over some of the logits of each row.

    m is about the largest logit, l = Σ exp(s − m), and o the sum with these weights, of values in the forward.
    """

    m: Array
    l: Array
    o: Array | float


def merged(a: Softmax, b: Softmax) -> Softmax:
    """The partial softmax over the logits of both."""
    m = jnp.maximum(a.m, b.m)
    shrink_a, shrink_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Softmax(m, a.l * shrink_a + b.l * shrink_b, a.o * shrink_a + b.o * shrink_b)


def of_nothing(x: Folded, dtype: Any, width: int) -> Softmax:
    """The partial softmax over no logits, the neutral element of `merged`."""
    return Softmax(of_rows(x, dtype, 1, jnp.finfo(dtype).min), of_rows(x, dtype, 1), of_rows(x, dtype, width))


def relative_to_lse(s: Array, lse: Array) -> tuple[Array, Array]:
    """m [b,g,r,s,1] and exp(s − lse − m), whose sum is finite.

    m is 0 unless lse is off by more than the largest exponent: near 10⁹ float32 resolves logits in steps of 64, and
    products summed in another order than in the forward may exceed lse by as much.
    """
    s = lax.sub(s, lse)
    largest = lax.stop_gradient(over_row(lax.reduce_max, s))
    m = attention.where(lax.gt(lax.abs(largest), np.array(_LARGE_EXPONENT, s.dtype)), at_least_lowest(largest), 0)
    return m, lax.exp(lax.sub(s, m))


def excess_and_mean(totals: Softmax, x: Folded, lse: Array) -> tuple[Array, Array]:
    """log(Σ_j exp(s_j − lse) + Σ_n exp(σ_n − lse)) of each row, and the weighted mean of what o sums."""
    if x.sinks is not None:
        m, p = relative_to_lse(attention.sinks_of_rows(x, lse.dtype), lse)
        totals = merged(totals, Softmax(m, p.sum(-1, keepdims=True), 0.0))
    l = attention.where(lax.gt(totals.l, np.zeros((), lse.dtype)), totals.l, 1)
    return lax.add(totals.m, lax.log(l)), lax.div(totals.o, l)


def at_least_lowest(m: Array) -> Array:
    """m, with the lowest finite number for −∞, so that exp(s − m) of a fully masked row is 0 and not exp(−∞ + ∞)."""
    return lax.max(m, np.array(jnp.finfo(m.dtype).min, m.dtype))


def not_zero(l: Array) -> Array:
    """l, which is 1 or more, and 1/2 for a fully masked row, where l is 0."""
    return lax.max(l, np.array(0.5, l.dtype))


def lse_of(m: Array, l: Array) -> Array:
    """m + log l, −∞ for a fully masked row."""
    is_visible = lax.gt(l, np.zeros((), l.dtype))
    return attention.where(is_visible, lax.add(m, lax.log(not_zero(l))), -np.inf)


def of_rows(x: Folded, dtype: Any, width: int, value: float = 0) -> Array:
    """An array [b,g,r,s,width] filled with one value."""
    return lax.full((*x.q.shape[:4], width), value, dtype)
