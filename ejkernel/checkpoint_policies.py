"""Policies for `jax.checkpoint`: what a layer keeps for its backward pass rather than computing it twice.

    layer = jax.checkpoint(layer, policy=ejkernel.checkpoint_policies.save_kernels)

Combine with those of JAX by `jax.checkpoint_policies.save_from_both_policies`.
"""

from collections.abc import Callable
from typing import Any

import jax

from .primitives._factory import PRIMITIVES

_OF_RING = jax.checkpoint_policies.save_only_these_names("ring_attention_o", "ring_attention_lse")


def save_kernels(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keeps the results of every kernel of this library, so that each forward kernel runs once.

    Of a ring it keeps o and lse, of which a backward is made, and not the results of every hop.
    """
    known = PRIMITIVES.get(primitive.name)
    return _OF_RING(primitive, *avals, **params) or (known is not None and known.primitive is primitive)


def save_only(*operations: str) -> Callable[..., bool]:
    """Keeps the results of the named operations, e.g. `save_only("flash_attention")`."""
    if unknown := sorted(set(operations) - PRIMITIVES.keys()):
        raise ValueError(f"no such operation: {', '.join(unknown)}; known are {', '.join(sorted(PRIMITIVES))}")
    kept = frozenset(PRIMITIVES[name].primitive for name in operations)
    return lambda primitive, *_, **__: primitive in kept
