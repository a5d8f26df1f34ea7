"""Arrays without elements, which say nothing but their type."""

from collections.abc import Callable
from typing import Any

import jax


def made_where_empty(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, which inside of a `jax.shard_map` is given others of the same type for those of no elements.

    Where a `jax.shard_map` takes an array without elements beside one that has some, `lambda x, y: (x, 2 * y)` say, XLA
    crashes when it compiles the program (0.10.2 – 0.12). What no equation reads is no operand.
    """
    full = [x for x in arrays if 0 not in x.shape]
    if len(full) in (0, len(arrays)) or not is_inside_shard_map():
        return function(*arrays)

    def run(*full):
        rest = iter(full)
        return function(*(jax.lax.full_like(x, 0) if 0 in x.shape else next(rest) for x in arrays))

    return jax.jit(run, inline=True)(*full)


def is_inside_shard_map() -> bool:
    """Whether a `jax.shard_map` around makes axes of the mesh manual."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
