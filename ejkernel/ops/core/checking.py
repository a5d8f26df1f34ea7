"""Checks that the results of a candidate are right and repeat bit for bit, before its time counts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# The largest error, relative to the largest entry of a result, that rounding may cause, that of products in TF32 for
# float32 included. A tile that is skipped, or read too early, causes a larger one.
_TOLERANCE = {
    "float64": 1e-8,
    "complex128": 1e-8,
    "float32": 2e-3,
    "complex64": 2e-3,
    "float16": 2e-2,
    "bfloat16": 5e-2,
}
_TOLERANCE_OF_NARROWER = 0.25


def disagreement(result: Any, reference: Any) -> str | None:
    """How a result differs from the reference by more than rounding; None if it does not.

    Entries that are not finite have to be equal, and so have integers and booleans.
    """
    leaves, expected = jax.tree.leaves(result), jax.tree.leaves(reference)
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in expected]:
        return "a result of other shapes or dtypes"
    for x, y in zip(leaves, expected, strict=True):
        tolerance = _TOLERANCE.get(x.dtype.name, _TOLERANCE_OF_NARROWER)
        same_elsewhere, error, scale = _compare(x, y)
        if not same_elsewhere:
            return "other values that are infinite, not a number, or integers"
        if error > tolerance * scale:
            return f"an error of {error / scale:.2g} of the largest entry, over {tolerance:.2g}"
    return None


def same_bits(result: Any, again: Any) -> bool:
    """Whether two results are equal bit for bit."""
    return all(bool(_equal_bits(x, y)) for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(again), strict=True))


@jax.jit
def _compare(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(equal where not finite, max |x − y| where both are finite, max |y| there)."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return (x == y).all(), jnp.float32(0), jnp.float32(1)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    equal = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    wide = functools.partial(jnp.asarray, dtype=jnp.promote_types(x.dtype, jnp.float32))
    largest = lambda values: jnp.max(jnp.abs(jnp.where(finite, values, 0)), initial=0)
    return (finite | equal).all(), largest(wide(x) - wide(y)), largest(wide(y))


@jax.jit
def _equal_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (x == y).all()
    return (jax.lax.bitcast_convert_type(x, bits) == jax.lax.bitcast_convert_type(y, bits)).all()
