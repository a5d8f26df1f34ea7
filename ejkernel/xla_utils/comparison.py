"""Comparisons of sizes, which may be symbolic dimensions of `jax.export`."""

from typing import Any

import jax.errors


def is_less(a: Any, b: Any) -> bool:
    """Whether a is less than b for all sizes that symbols may stand for."""
    try:
        return bool(a < b)
    except jax.errors.InconclusiveDimensionOperation:
        return False
