"""What is computed from a tile of q·kᵀ."""

import operator
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from .._launch import PER_COLUMN, PER_ROW, across, down, indices, load_vector
from .problem import LOG2_E, Problem
from .reach import Reach

# Weights may be as great as two to this, where they are no less exact for it.
SLACK = 8


class Statistics(NamedTuple):
    """Of rows, over the keys seen so far: nearly the greatest exponent of two, and the sum of powers relative to it."""

    maximum: Array
    total: Array


def logits(products: Array, problem: Problem) -> Array:
    """The logits but for a factor, `problem.exponent`: q·kᵀ, or tanh(scale·q·kᵀ / softcap)."""
    if problem.softcap is None:
        return products
    e = jnp.exp2(products * (2 * LOG2_E * problem.scale / problem.softcap))
    return 1 - 2 / (e + 1)


class View(NamedTuple):
    """The batch index and the first row of a tile, rows being queries or keys, and what arrays say of whom it sees."""

    batch: Array
    row: Array
    reach: Reach | None
    of_keys: bool = False


def seen(view: View, column: Array, shape: tuple[int, int], uneven_keys: bool, problem: Problem) -> Array | None:
    """Who sees whom in a tile that begins at a column, keys perhaps past the end if `uneven_keys`; None if all do."""
    batch, row, reach, of_keys = view
    rows, columns = indices(row, 0, shape), indices(column, 1, shape)
    conditions = []
    if reach is not None and reach.ranges is not None:
        low, high = (across(_load(x, batch, row, shape[0], PER_ROW), rows) for x in reach.ranges)
        conditions += [columns >= low, columns < high]
    elif reach is not None:
        of_rows, of_columns = reach.ids
        ids = across(_load(of_rows, batch, row, shape[0], PER_ROW), rows)
        conditions.append(ids == down(_load(of_columns, batch, column, shape[1], PER_COLUMN), columns))
    elif uneven_keys:
        conditions.append((rows if of_keys else columns) < problem.K)
    low, high = problem.band(of_keys)
    if high is not None:
        conditions.append(columns <= rows + high)
    if low is not None:
        conditions.append(columns >= rows + low)
    return reduce(operator.and_, conditions) if conditions else None


def _load(vectors, batch: Array, first: Array, length: int, layout) -> Array:
    """Of vectors [b, n] in device memory a part of one."""
    batch = batch if vectors.shape[0] > 1 else 0
    return load_vector(vectors.at[batch, pl.ds(first, length)], layout, optimized=False)


def weights(s: Array, before: Statistics, ok: Array | None, exponent: float) -> tuple[Array, Statistics, Array]:
    """Of rows of queries exp(s − maximum) under the new maximum, the statistics, and the factor of earlier sums.

    s times `exponent` is an exponent of two. A maximum stays as long as none is greater by more than SLACK: then the
    factor is 1.
    """
    if ok is not None:
        s = jnp.where(ok, s, -jnp.inf)
    greatest = s.max(axis=1) * exponent
    maximum = jnp.where(greatest > before.maximum + SLACK, greatest, before.maximum)
    base = maximum if ok is None else jnp.where(maximum == -jnp.inf, 0.0, maximum)  # rows that have seen nothing yet
    fade = jnp.exp2(before.maximum - base)
    p = jnp.exp2(s * exponent - across(base, s))
    return p, Statistics(maximum, before.total * fade + p.sum(axis=1)), fade
