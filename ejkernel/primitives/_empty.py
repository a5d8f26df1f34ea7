"""Arrays without elements, whose values are known from their type."""

from collections.abc import Callable
from typing import Any

import jax


def made_where_empty(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function(*arrays)`, with arrays without elements replaced by new ones inside a `jax.shard_map`.

    XLA crashes when it compiles a `jax.shard_map` that takes an array without elements beside one that has some, such
    as `lambda x, y: (x, 2 * y)` (0.10.2 – 0.12). An array that no equation reads is dropped from its operands.
    """
    full = [x for x in arrays if not _is_empty(x)]
    if len(full) in (0, len(arrays)) or not is_inside_shard_map():
        return function(*arrays)

    def run(*full):
        rest = iter(full)
        return function(*(jax.lax.full_like(x, 0) if _is_empty(x) else next(rest) for x in arrays))

    return jax.jit(run, inline=True)(*full)


def _is_empty(x: Any) -> bool:
    """Whether there are no elements; the primal of a tracer may be a number of Python, as in `jax.grad(f)(1.0)`."""
    return 0 in jax.typeof(x).shape


def is_inside_shard_map() -> bool:
    """Whether this is traced inside a `jax.shard_map`, with manual mesh axes."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)
