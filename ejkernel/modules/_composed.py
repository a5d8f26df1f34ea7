"""Operations composed of other operations and of JAX: functions without a primitive, registered by name.

Their transforms and configs are those of the operations that they call. They report any other choice that they make.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from ..kernels._registry import kernel_registry
from ._one_program import one_program

F = TypeVar("F", bound=Callable[..., Any])

COMPOSED: dict[str, Callable[..., Any]] = {}
"""The composed operations by name."""

_listener: ContextVar[list[str] | None] = ContextVar("_listener", default=None)


def composed(function: F) -> F:
    """Registers a function as an operation of its name; it is the same in `ejkernel.lax` and `ejkernel.modules`."""
    name = function.__name__
    called = functools.wraps(function)(one_program(function, name, inspect.signature(function)))
    COMPOSED[name] = called
    called.__module__ = "ejkernel.lax"
    kernel_registry.register_operation(name, called)
    return called


def tell(choice: str) -> None:
    """Reports a choice of a composed operation during its trace, and the reason, to an `explain` of the call."""
    if (choices := _listener.get()) is not None:
        choices.append(choice)


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collects the choices that are reported while tracing within this context."""
    token = _listener.set(choices := [])
    try:
        yield choices
    finally:
        _listener.reset(token)
