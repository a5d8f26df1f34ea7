"""A block of the recurrence on one head: the inter-chunk part, from the state, and the intra-chunk part, from pairs.

With i, j = 1 … c in a block with the initial state h, and one log decay g, of heads or of features:

    o_i = q_iᵀ (exp(P_i) h + Σ_{j≤i} exp(D_ij) k_j v_jᵀ),    h' = exp(P_c) h + Σ_j exp(D_cj) k_j v_jᵀ
    D_ij = Σ_{j<l≤i} g_l,    P_i = Σ_{l≤i} g_l

In the gated delta rule a token replaces the value of its key: in the place of v_j are β_j δ_j, where

    δ_i = v_i − exp(P_i) hᵀk_i − Σ_{j<i} exp(D_ij) (k_i·k_j) β_j δ_j

is a triangular system.

Arrays have two dimensions, which Mosaic handles best. Sums over tokens are products with matrices of 0 and 1, so that
each D_ij is summed separately, and is not positive if no g is. The state is [e, d], so that decays of key features are
a row, and those of value features a column. The code has no slices, as Mosaic cannot lower their transposes: kernels
use derivatives of this function that JAX computes.

A pair of tokens contributes only to the gradients of the decays between them, so that nothing cancels. The largest
remaining error is that of an exponent, which many terms share: see `_decay`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

# The lower limit of gates: the decay is already 0 in float32 there, and sums of gates stay finite.
LEAST_GATE = -1e4
# Of keys and queries that are divided by √(Σ x² + ε).
NORM_EPSILON = 1e-6


class Tokens(NamedTuple):
    """q, k [c,d] and v [c,e] of a block, and its gates or None: g [c,1] of heads, gk [c,d] and gv [c,e] of features;
    beta [c,1] of the delta rule, with which there are no gates of features.
    """

    q: Array
    k: Array
    v: Array
    g: Array | None = None
    gk: Array | None = None
    gv: Array | None = None
    beta: Array | None = None


def block(scale: float, normalises: bool, state: Array, tokens: Tokens) -> tuple[Array, Array]:
    """The state [e,d] after the block, and o [c,e]; all in float32. It may normalise q and k."""
    q, k, v, g, gk, gv, beta = tokens
    if normalises:
        q, k = (a * lax.rsqrt(jnp.sum(a * a, axis=1, keepdims=True) + NORM_EPSILON) for a in (q, k))
    c, q = q.shape[0], q * scale
    row, column = (lax.broadcasted_iota(jnp.int32, (c, c), axis) for axis in (0, 1))
    ones = lambda where: where.astype(jnp.float32)
    since, until = ones(column <= row), ones(column > row)  # sums for token "row" over tokens "column"
    last = ones(lax.broadcasted_iota(jnp.int32, (c, 1), 0) == c - 1)
    # weights[j, i]
    weights = _product(k, q, (1, 1)) if gk is None else _weights_by_feature(q, k, gk)
    from_start, to_end = jnp.ones_like(q), jnp.ones_like(k)
    between = None if g is None else _decay(until, ones(row <= column) * g)
    weights = weights if between is None else weights * between
    gates = [gate for gate in (gk, None if g is None else jnp.broadcast_to(g, q.shape)) if gate is not None]
    for gate in gates:
        from_start = from_start * _decay(since, gate)
        to_end = to_end * _decay(until, gate)
    weights = jnp.where(row <= column, weights, 0.0)
    if beta is not None:
        among_keys = _product(k, k, (1, 1)) * beta
        among_keys = jnp.where(row < column, among_keys if between is None else among_keys * between, 0.0)
        missing = v - _product(k * from_start, state, (1, 1))
        v = beta * _product(_unit_inverse(among_keys), missing, (0, 0))
    inter_chunk = _product(q * from_start, state, (1, 1))
    state = state * jnp.sum(last * from_start, axis=0, keepdims=True) if gates else state
    if gv is None:
        return state + _product(v, k * to_end, (0, 0)), inter_chunk + _product(weights, v, (0, 0))
    from_start = _decay(since, gv)
    o = inter_chunk * from_start + _values_by_feature(weights, v, gv)
    state = state * _product(from_start, last, (0, 0))
    return state + _product(v * _decay(until, gv), k * to_end, (0, 0)), o


def _weights_by_feature(q: Array, k: Array, gk: Array) -> Array:
    """Σ_d q_id k_jd exp(D_ijd) at [j, i], 0 for j > i; computed row by row, as D has c·c·d elements."""
    c = q.shape[0]
    token = lax.broadcasted_iota(jnp.int32, q.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, (c, c), 1)
    row_of = lambda a, i: jnp.sum(jnp.where(token == i, a, 0.0), axis=0, keepdims=True)
    between, weights = jnp.zeros_like(k), jnp.zeros((c, c), jnp.float32)
    for i in range(c):
        between = between + jnp.where(token < i, row_of(gk, i), 0.0)
        terms = jnp.where(token <= i, row_of(q, i) * k * jnp.exp(between), 0.0)
        weights = weights + jnp.where(column == i, jnp.sum(terms, axis=1, keepdims=True), 0.0)
    return weights


def _values_by_feature(weights: Array, v: Array, gv: Array) -> Array:
    """Σ_j weights_ji v_je exp(D_ije) at [i, e], likewise computed row by row."""
    c = v.shape[0]
    token = lax.broadcasted_iota(jnp.int32, v.shape, 0)
    column = lax.broadcasted_iota(jnp.int32, (c, c), 1)
    between, o = jnp.zeros_like(v), jnp.zeros_like(v)
    for i in range(c):
        between = between + jnp.where(token < i, jnp.sum(jnp.where(token == i, gv, 0.0), axis=0, keepdims=True), 0.0)
        of_token = jnp.sum(jnp.where(column == i, weights, 0.0), axis=1, keepdims=True)
        o_i = jnp.sum(jnp.where(token <= i, of_token * v * jnp.exp(between), 0.0), axis=0, keepdims=True)
        o = o + jnp.where(token == i, o_i, 0.0)
    return o


@jax.custom_jvp
def _unit_inverse(upper: Array) -> Array:
    """(I + N)⁻¹ of a strictly upper triangular N [c,c], by the inverses X of its diagonal blocks, from size 1 on:

        [A B; 0 C]⁻¹ = [A⁻¹ −A⁻¹ B C⁻¹; 0 C⁻¹] = X − X [0 B; 0 0] X

    Every factor is the inverse of a part of the matrix, so that nothing grows larger than the result, as powers of N
    would if keys are similar.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, upper.shape, axis) for axis in (0, 1))
    inverse, size = (row == column).astype(jnp.float32) - jnp.where(row >> 1 == column >> 1, upper, 0.0), 1
    while 1 << size < upper.shape[0]:
        joins = (row >> size + 1 == column >> size + 1) & (row >> size != column >> size)
        above = _product(inverse, jnp.where(joins, upper, 0.0), (1, 0))
        inverse, size = inverse - _product(above, inverse, (1, 0)), size + 1
    return inverse


@_unit_inverse.defjvp
def _unit_inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """The tangent of X = (I + N)⁻¹: X (I + N) = I gives dX = −X dN X."""
    inverse = _unit_inverse(*primals)
    return inverse, -_product(_product(inverse, *tangents, (1, 0)), inverse, (1, 0))


@jax.custom_jvp
def _decay(chosen: Array, gate: Array) -> Array:
    """exp(chosen · gate) for a matrix `chosen` of 0 and 1, exact up to the last bit.

    The error of an exponent is a common factor of all terms that decay by it, and so does not average out in the
    gradient of a decay. The gates are summed in three parts of 8 bits, where the sums of the first part are exact, and
    the rounding error of the total is multiplied in as a second factor.
    """
    chosen, rest, sums = chosen.astype(jnp.bfloat16), jnp.maximum(gate, LEAST_GATE), []
    for _ in range(3):
        part = _first_bits(rest)
        sums.append(_product(chosen, part.astype(jnp.bfloat16), (1, 0)))
        rest = rest - part
    most, least = sums[0], sums[1] + sums[2]
    total = most + least
    decay = jnp.exp(total)
    return decay + decay * ((most - total) + least)


@_decay.defjvp
def _decay_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    decay = _decay(*primals)
    return decay, decay * _product(primals[0], tangents[1], (1, 0))


def _first_bits(x: Array) -> Array:
    """x truncated to the bits of bfloat16; compilers may remove a cast to bfloat16 and back."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)


def _product(a: Array, b: Array, contracted: tuple[int, int]) -> Array:
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
