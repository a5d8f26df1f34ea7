"""The softmax of rows whose logits come tile by tile: what is known of the logits of some tiles, and of all of them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import _attention as attention
from ._attention import Folded, over_row

# Above it a sum of exponentials, squared in a derivative, may be infinite or 0.
_LARGE_EXPONENT = 20.0


class Softmax(NamedTuple):
    """Of some of the logits of each row: m, the largest or near it, and relative to it the sum l of exp(s − m) and the
    sum o of what these weigh, values in the forward.
    """

    m: Array
    l: Array
    o: Array | float


def merged(a: Softmax, b: Softmax) -> Softmax:
    """Of the logits of both."""
    m = jnp.maximum(a.m, b.m)
    shrink_a, shrink_b = jnp.exp(a.m - m), jnp.exp(b.m - m)
    return Softmax(m, a.l * shrink_a + b.l * shrink_b, a.o * shrink_a + b.o * shrink_b)


def of_nothing(x: Folded, dtype: Any, width: int) -> Softmax:
    """Of no logits: what `merged` leaves others as they are with."""
    return Softmax(of_rows(x, dtype, 1, jnp.finfo(dtype).min), of_rows(x, dtype, 1), of_rows(x, dtype, width))


def relative_to_lse(s: Array, lse: Array) -> tuple[Array, Array]:
    """m [b,g,r,s,1] and exp(s − lse − m), which have a finite sum.

    m is 0, but where lse is off by more than float32 may be given as an exponent. Of logits near 10⁹ it keeps every
    64th number, and products that are summed in another order than those of the forward are above lse by as much.
    """
    s = lax.sub(s, lse)
    largest = lax.stop_gradient(over_row(lax.reduce_max, s))
    m = attention.where(lax.gt(lax.abs(largest), np.array(_LARGE_EXPONENT, s.dtype)), at_least_lowest(largest), 0)
    return m, lax.exp(lax.sub(s, m))


def excess_and_mean(totals: Softmax, x: Folded, lse: Array) -> tuple[Array, Array]:
    """log(Σ_j exp(s_j − lse) + Σ_n exp(σ_n − lse)) of each row, and the mean of what o sums, by the weights."""
    if x.sinks is not None:
        m, p = relative_to_lse(attention.sinks_of_rows(x, lse.dtype), lse)
        totals = merged(totals, Softmax(m, p.sum(-1, keepdims=True), 0.0))
    l = attention.where(lax.gt(totals.l, np.zeros((), lse.dtype)), totals.l, 1)
    return lax.add(totals.m, lax.log(l)), lax.div(totals.o, l)


def at_least_lowest(m: Array) -> Array:
    """m, or the lowest number for −∞, where no logit counts: then exp(s − m) is 0 and not exp(−∞ + ∞)."""
    return lax.max(m, np.array(jnp.finfo(m.dtype).min, m.dtype))


def not_zero(l: Array) -> Array:
    """l, which is 1 or more, or 1/2 where no logit counts and l is 0."""
    return lax.max(l, np.array(0.5, l.dtype))


def lse_of(m: Array, l: Array) -> Array:
    """m + log l, −∞ where no logit counts."""
    is_visible = lax.gt(l, np.zeros((), l.dtype))
    return attention.where(is_visible, lax.add(m, lax.log(not_zero(l))), -np.inf)


def of_rows(x: Folded, dtype: Any, width: int, value: float = 0) -> Array:
    """[b,g,r,s,width] of one value."""
    return lax.full((*x.q.shape[:4], width), value, dtype)
