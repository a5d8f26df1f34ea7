"""Division that rounds up."""

from typing import Any


def cdiv(a: Any, b: Any) -> Any:
    """⌈a / b⌉ of integers, of sizes that may be symbolic, and of arrays."""
    return -(-a // b)
