"""What is computed from a tile of q·kᵀ."""

import operator
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from .launch import WGMMA, across
from .problem import LOG2_E, Problem


class Statistics(NamedTuple):
    """Of rows, over the keys seen so far: the greatest exponent of two, and the sum of the powers relative to it."""

    maximum: Array
    total: Array


def logits(products: Array, problem: Problem) -> Array:
    """The logits but for a factor, `problem.exponent`: q·kᵀ, or tanh(scale·q·kᵀ / softcap)."""
    if problem.softcap is None:
        return products
    e = jnp.exp2(products * (2 * LOG2_E * problem.scale / problem.softcap))
    return 1 - 2 / (e + 1)


def indices(first: Array, axis: int, shape: tuple[int, int]) -> Array:
    """first, first + 1, … along an axis of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + first


def seen(i: Array, j: Array, uneven_keys: bool, problem: Problem) -> Array | None:
    """Whether queries i see keys j, which may lie past the end where there are `uneven_keys`; None where all do."""
    conditions = []
    if uneven_keys:
        conditions.append(j < problem.K)
    if problem.high is not None:
        conditions.append(j <= i + problem.high)
    if problem.low is not None:
        conditions.append(j >= i + problem.low)
    return reduce(operator.and_, conditions) if conditions else None


def weights(s: Array, before: Statistics, ok: Array | None, problem: Problem) -> tuple[Array, Statistics, Array]:
    """Of rows of queries exp(s − maximum) under the new maximum, the statistics, and what brings earlier sums to it."""
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    maximum = jnp.maximum(before.maximum, s.max(axis=1) * problem.exponent)
    base = maximum if ok is None else jnp.where(maximum == -jnp.inf, 0.0, maximum)  # rows that have seen nothing yet
    fade = jnp.exp2(before.maximum - base)
    p = jnp.exp2(s * problem.exponent - across(base, s))
    return p, Statistics(maximum, before.total * fade + p.sum(axis=1)), fade
