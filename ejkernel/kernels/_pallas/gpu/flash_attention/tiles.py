"""What is computed from a tile of q·kᵀ, whose rows are queries and whose columns are keys."""

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


def seen(row: Array, column: Array, shape: tuple[int, int], problem: Problem) -> Array | None:
    """Whether the queries from `row` on see the keys from `column` on; None where they all do."""
    along = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)
    i, j = along(0) + row, along(1) + column
    conditions = []
    if problem.K % shape[1]:
        conditions.append(j < problem.K)
    if problem.high is not None:
        conditions.append(j <= i + problem.high)
    if problem.low is not None:
        conditions.append(j >= i + problem.low)
    ok = None
    for condition in conditions:
        ok = condition if ok is None else ok & condition
    return ok


def weights(s: Array, before: Statistics, ok: Array | None, problem: Problem) -> tuple[Array, Statistics, Array]:
    """exp(s − maximum) under the new maximum, the statistics, and the factor that brings earlier sums to it."""
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    maximum = jnp.maximum(before.maximum, s.max(axis=1) * problem.exponent)
    base = maximum if ok is None else jnp.where(maximum == -jnp.inf, 0.0, maximum)  # rows that have seen nothing yet
    fade = jnp.exp2(before.maximum - base)
    p = jnp.exp2(s * problem.exponent - across(base, s))
    return p, Statistics(maximum, before.total * fade + p.sum(axis=1)), fade
