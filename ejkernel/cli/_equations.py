"""The equations of an operation in a jaxpr."""

from collections.abc import Iterator
from typing import Any


def equations(jaxpr: Any, operation: str) -> Iterator[Any]:
    """The equations, also in inner jaxprs, whose primitive is `operation` or begins with its name."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name.startswith(operation):
            yield equation
        for inner in _jaxprs(equation.params):
            yield from equations(inner, operation)


def _jaxprs(parameters: Any) -> Iterator[Any]:
    if isinstance(parameters, dict):
        parameters = parameters.values()
    for value in parameters:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, tuple | list):
            yield from _jaxprs(value)
