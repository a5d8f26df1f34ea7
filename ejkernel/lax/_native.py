"""Makes functions like those of `jax.lax` from operations.

Within a trace the function binds its primitive. On concrete arrays it runs one compiled program.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..modules._one_program import one_program
from ..modules._operation import Operation
from ..modules._signatures import annotations_of, result_type
from ..types import ConfigLike


def native(operation: type[Operation]) -> Callable[..., Any]:
    """The function of an operation in the lax API: the signature of its arguments and `config`.

    Type checkers read it in the stub of the package.
    """
    name = operation.algorithm.name
    signature = inspect.signature(operation.prepare_arguments)
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigLike | None)
    call = functools.wraps(operation.prepare_arguments)(one_program(operation.call, name, signature))
    parameters = list(signature.parameters.values())
    call.__signature__ = signature.replace(parameters=[*parameters, config], return_annotation=result_type(operation))
    call.__annotations__ = annotations_of(call.__signature__)
    call.__name__ = call.__qualname__ = name
    call.__module__ = "ejkernel.lax"
    return call
