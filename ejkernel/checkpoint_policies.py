"""Policies for `jax.checkpoint`: what a layer keeps for its backward pass rather than computing it twice.

    layer = jax.checkpoint(layer, policy=ejkernel.checkpoint_policies.save_kernels)

Combine with those of JAX by `jax.checkpoint_policies.save_from_both_policies`.
"""

from collections.abc import Callable
from typing import Any

from .primitives._factory import PRIMITIVES


def save_kernels(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps the results of every kernel of this library, so that each forward kernel runs once."""
    known = PRIMITIVES.get(primitive.name)
    return known is not None and known.primitive is primitive


def save_only(*operations: str) -> Callable[..., bool]:
    """Keeps the results of the named operations, e.g. `save_only("flash_attention")`."""
    if unknown := sorted(set(operations) - PRIMITIVES.keys()):
        raise ValueError(f"no such operation: {', '.join(unknown)}; known are {', '.join(sorted(PRIMITIVES))}")
    kept = frozenset(PRIMITIVES[name].primitive for name in operations)
    return lambda primitive, *_, **__: primitive in kept
