"""Searches in ascending arrays, without a loop: on a GPU that would be a launch for each step."""

import jax.numpy as jnp
import numpy as np
from jax import Array


def entries_until(ascending: Array, x: Array) -> Array:
    """How many entries of an ascending array [n] are at most each x, int32."""
    return jnp.searchsorted(ascending, x, side="right", method="scan_unrolled").astype(np.int32)


def entries_before(ascending: Array, x: Array) -> Array:
    """How many entries of an ascending array [n] are below each x, int32."""
    return jnp.searchsorted(ascending, x, method="scan_unrolled").astype(np.int32)
