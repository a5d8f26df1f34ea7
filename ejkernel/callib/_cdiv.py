"""Division that rounds up."""

from typing import Any


def cdiv(a: Any, b: Any) -> Any:
    """⌈a / b⌉ for integers, sizes that may be symbolic, and arrays."""
    return -(-a // b)
