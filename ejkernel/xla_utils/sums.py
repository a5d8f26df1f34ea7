"""Sums in float32: with smaller errors than those of its additions, and over the axes of a broadcast."""

import math

import jax.numpy as jnp
from jax import Array


def exact_sum(a: Array, axes: tuple[int, ...]) -> Array:
    """Σ a as if rounded once: the leading bits of all terms are multiples of one power of two, and so add exactly."""
    grid = 2 * math.prod(a.shape[i] for i in axes) * jnp.max(jnp.abs(a), axes, keepdims=True)
    leading = (a + grid) - grid
    return leading.sum(axes) + (a - leading).sum(axes)


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum of x in float32 over the axes along which an array of `shape` was broadcast to it."""
    broadcast = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(broadcast, dtype=jnp.float32, keepdims=True)
