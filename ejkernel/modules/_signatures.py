"""The declared types of an operation, for the functions that are made from it and for type checkers."""

import inspect
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, runtime_checkable

from ._operation import Operation, Prepared

P = ParamSpec("P")
Result = TypeVar("Result", covariant=True)


@runtime_checkable
class Declared(Protocol[P, Result]):
    """An operation as a type checker sees it: the parameters and the declared type of the result."""

    @staticmethod
    def prepare_arguments(*args: P.args, **kwargs: P.kwargs) -> Prepared[Result]: ...


def result_type(operation: type[Operation]) -> Any:
    """The type of the result: X of `Prepared[X]`, which `prepare_arguments` is declared to return."""
    declared = inspect.signature(operation.prepare_arguments).return_annotation
    return next(iter(get_args(declared)), inspect.Signature.empty)


def annotations_of(signature: inspect.Signature) -> dict[str, Any]:
    """The `__annotations__` of a function with this signature."""
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    types["return"] = signature.return_annotation
    return {name: x for name, x in types.items() if x is not signature.empty}
