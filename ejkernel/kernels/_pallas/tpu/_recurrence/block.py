"""A block of the recurrence on one head, in two-dimensional arrays alone, which is what Mosaic is good at.

With i, j = 1 … c in a block that begins in the state h, one decay standing for all kinds here,

    o_i = q_iᵀ (exp(P_i) h + Σ_{j≤i} exp(D_ij) k_j v_jᵀ),    h' = exp(P_c) h + Σ_j exp(D_cj) k_j v_jᵀ
    D_ij = Σ_{j<l≤i} g_l,    P_i = Σ_{l≤i} g_l

Sums over tokens are products with matrices of 0 and 1, so that each D_ij is a sum of its own, at most 0 where decays
are. The state is [e, d], so that a decay by key feature is one row, and one by value feature a column. There are no
slices, whose transposes Mosaic lacks: JAX differentiates this function where a kernel calls for its derivative.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Tokens(NamedTuple):
    """q, k [c,d], v [c,e], g [c,1] the decay of the head, gk [c,d] and gv [c,e] those of features; None if absent."""

    q: Array
    k: Array
    v: Array
    g: Array | None = None
    gk: Array | None = None
    gv: Array | None = None


def block(scale: float, state: Array, tokens: Tokens) -> tuple[Array, Array]:
    """The state [e,d] after the block, and o [c,e]; all in float32."""
    q, k, v, g, gk, gv = tokens
    c, q = q.shape[0], q * scale
    row, column = (lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
    ones = lambda where: where.astype(jnp.float32)
    since, until, total = ones(column <= row), ones(column > row), None  # of token "row", over tokens "column"
    # weights[j, i]
    weights = _product(k, q, (1, 1)) if gk is None else _weights_by_feature(q, k, gk)
    from_start, to_end = jnp.ones_like(q), jnp.ones_like(k)
    if g is not None:
        weights = weights * jnp.exp(_product(until, ones(row <= column) * g, (1, 0)))
    gates = [gate for gate in (gk, None if g is None else jnp.broadcast_to(g, q.shape)) if gate is not None]
    for gate in gates:
        from_start = from_start * jnp.exp(_product(since, gate, (1, 0)))
        to_end = to_end * jnp.exp(_product(until, gate, (1, 0)))
        decay = jnp.exp(jnp.sum(gate, axis=0, keepdims=True))
        total = decay if total is None else total * decay
    weights = jnp.where(row <= column, weights, 0.0)
    seen = _product(q * from_start, state, (1, 1))
    state = state if total is None else state * total
    if gv is None:
        return state + _product(v, k * to_end, (0, 0)), seen + _product(weights, v, (0, 0))
    o = seen * jnp.exp(_product(since, gv, (1, 0))) + _values_by_feature(weights, v, gv)
    state = state * jnp.exp(_product(gv, jnp.ones((c, 1), jnp.float32), (0, 0)))
    return state + _product(v * jnp.exp(_product(until, gv, (1, 0))), k * to_end, (0, 0)), o


def _weights_by_feature(q: Array, k: Array, gk: Array) -> Array:
    """Σ_d q_id k_jd exp(D_ijd) at [j, i], 0 for j > i: row by row, for D has as many numbers as c c d."""
    c = q.shape[0]
    token = lax.broadcasted_iota(jnp.int32, q.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, (c, c), 1)
    row_of = lambda a, i: jnp.sum(jnp.where(token == i, a, 0.0), axis=0, keepdims=True)
    between, weights = jnp.zeros_like(k), jnp.zeros((c, c), jnp.float32)
    for i in range(c):
        between = between + jnp.where(token < i, row_of(gk, i), 0.0)
        seen = jnp.where(token <= i, row_of(q, i) * k * jnp.exp(between), 0.0)
        weights = weights + jnp.where(column == i, jnp.sum(seen, axis=1, keepdims=True), 0.0)
    return weights


def _values_by_feature(weights: Array, v: Array, gv: Array) -> Array:
    """Σ_j weights_ji v_je exp(D_ije) at [i, e], likewise."""
    c = v.shape[0]
    token = lax.broadcasted_iota(jnp.int32, v.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, (c, c), 1)
    between, o = jnp.zeros_like(v), jnp.zeros_like(v)
    for i in range(c):
        between = between + jnp.where(token < i, jnp.sum(jnp.where(token == i, gv, 0.0), axis=0, keepdims=True), 0.0)
        of_token = jnp.sum(jnp.where(column == i, weights, 0.0), axis=1, keepdims=True)
        seen = jnp.sum(jnp.where(token <= i, of_token * v * jnp.exp(between), 0.0), axis=0, keepdims=True)
        o = o + jnp.where(token == i, seen, 0.0)
    return o


def _product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
