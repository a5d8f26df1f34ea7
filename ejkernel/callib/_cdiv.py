"""Division that rounds up."""

from typing import Any, Protocol, overload, runtime_checkable

from jaxtyping import Array, Integer


@runtime_checkable
class Size(Protocol):
    """What ⌈a / b⌉ is defined for: integers, arrays of integers, and the symbolic sizes of `jax.export`."""

    def __neg__(self) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...


@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: Integer[Array, "..."], b: int | Integer[Array, "..."]) -> Integer[Array, "..."]: ...
@overload
def cdiv(a: Size, b: Size) -> Size: ...
def cdiv(a: Size, b: Size) -> Size:
    """⌈a / b⌉ for integers, arrays of integers, and sizes that may be symbolic."""
    return -(-a // b)
