"""A loop over chunks of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim


def in_chunks(f: Callable[..., tuple[Any, Any]], carry: Any, rows: Any, size: int) -> tuple[Any, Any]:
    """The carry and the results of (carry, results of a chunk) = f(carry, *chunk), over chunks of `size` rows.

    The last chunk is padded with rows of 0. Derivatives store only the rows and the carry of each chunk.
    """
    length = jax.tree.leaves(rows)[0].shape[0]
    size = 1 if is_symbolic_dim(length) else max(1, min(size, length))
    count = -(-length // size)

    def divided(x):
        x = x if size == 1 else jnp.pad(x, [(0, count * size - length)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, size, *x.shape[1:])

    @partial(jax.checkpoint, prevent_cse=False)
    def step(carry, chunk):
        return f(carry, *chunk)

    carry, results = lax.scan(step, carry, jax.tree.map(divided, rows))
    return carry, jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:])[:length], results)
