"""The declared types of an operation, for the functions that are made from it."""

import inspect
from typing import Any, get_args

from ._operation import Operation


def result_type(operation: type[Operation]) -> Any:
    """The type of the result: X of `Prepared[X]`, which `prepare_arguments` is declared to return."""
    declared = inspect.signature(operation.prepare_arguments).return_annotation
    return next(iter(get_args(declared)), inspect.Signature.empty)


def annotations_of(signature: inspect.Signature) -> dict[str, Any]:
    """The `__annotations__` of a function with this signature."""
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    types["return"] = signature.return_annotation
    return {name: x for name, x in types.items() if x is not signature.empty}
