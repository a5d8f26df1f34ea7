"""Operations that are composed of others and of JAX's: plain functions without a primitive, known by their names.

Every transform is that of what they are composed of, and so are their configs. What else they choose they tell.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

COMPOSED: dict[str, Callable[..., Any]] = {}
"""The composed operations by name."""

_listener: ContextVar[list[str] | None] = ContextVar("_listener", default=None)


def composed(function: F) -> F:
    """Registers a function as an operation of its name; it is the same in `ejkernel.lax` and `ejkernel.modules`."""
    COMPOSED[function.__name__] = function
    function.__module__ = "ejkernel.lax"
    return function


def tell(choice: str) -> None:
    """Says what a composed operation chose while it is traced, and why, to whoever explains the call."""
    if (choices := _listener.get()) is not None:
        choices.append(choice)


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The choices of what is traced within."""
    token = _listener.set(choices := [])
    try:
        yield choices
    finally:
        _listener.reset(token)
