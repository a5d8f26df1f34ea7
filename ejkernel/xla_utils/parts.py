"""Numbers of float32 as sums of numbers of fewer bits."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def parts_of(x: Array, dtype: np.dtype) -> list[Array]:
    """Numbers of float32 as themselves, or as sums of two in 16 bits: what they are rounded to, and what that leaves.

    They are not converted back and forth, which XLA may simplify to no conversion, so that nothing is left.
    """
    if dtype == np.float32:
        return [x]
    rounded = lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    return [rounded.astype(dtype), (x - rounded).astype(dtype)]
