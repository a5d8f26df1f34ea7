"""Batch-invariant computation: the bits of a batch element's results do not depend on the rest of the batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._tiles import varying_like


def one_by_one(f: Callable[[Any], Sequence[Array]], arrays: Any, batch: int, summed: Sequence[int] = ()) -> list[Array]:
    """f of every batch element of arrays [b?,…], each as a batch of one; results listed in `summed` are added up.

    The program for one element is between optimisation barriers, so that XLA compiles it alike for any batch size.
    """
    leaves, structure = jax.tree.flatten(arrays)
    moving = [x for x in leaves if x.shape[0] == batch]

    def of_element(moving):
        rest = iter(moving)
        given = [next(rest)[None] if x.shape[0] == batch else x for x in leaves]
        return lax.optimization_barrier(tuple(f(structure.unflatten(lax.optimization_barrier(given)))))

    def step(totals, moving):
        found = of_element(moving)
        totals = [total + found[n].astype(total.dtype) for total, n in zip(totals, summed, strict=True)]
        return totals, [x[0] for n, x in enumerate(found) if n not in summed]

    types = jax.eval_shape(of_element, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in moving])
    nothing = [jnp.zeros(types[n].shape, jnp.promote_types(types[n].dtype, jnp.float32)) for n in summed]
    totals, rows = map(iter, lax.scan(step, varying_like(arrays, nothing), moving))
    return [next(totals).astype(x.dtype) if n in summed else next(rows) for n, x in enumerate(types)]
