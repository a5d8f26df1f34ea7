"""Operations that are composed of others and of JAX's: plain functions without a primitive, known by their names.

Every transform is that of what they are composed of, and so are their configs: there is nothing else to choose.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

COMPOSED: dict[str, Callable[..., Any]] = {}
"""The composed operations by name."""


def composed(function: F) -> F:
    """Registers a function as an operation of its name; it is the same in `ejkernel.lax` and `ejkernel.modules`."""
    COMPOSED[function.__name__] = function
    function.__module__ = "ejkernel.lax"
    return function
