"""Makes functions like those of `jax.lax` from operations.

Within a trace the function binds its primitive. On concrete arrays it runs one compiled program, which is cached by the
static options, so that a call costs little more than one of a jitted function.
"""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import jax

from ..modules._operation import Operation
from ..modules._signatures import annotations_of, result_type
from ..types import ConfigLike

_READ_WHILE_TRACING = (
    "EJKERNEL_AUTOTUNE_BUDGET_S",
    "EJKERNEL_AUTOTUNE_POLICY",
    "EJKERNEL_CACHE_DIR",
    "EJKERNEL_OPS_RECORD",
    "EJKERNEL_OPS_STAMP",
    "EJKERNEL_TRITON_SMEM_LIMIT",
)


def native(operation: type[Operation]) -> Callable[..., Any]:
    """The function of an operation in the lax API: the signature of its arguments and `config`.

    Type checkers read it in the stub of the package.
    """
    name = operation.algorithm.name
    signature = inspect.signature(operation.prepare_arguments)
    config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigLike | None)

    @functools.lru_cache(maxsize=4096)
    def compiled(static, types, environment):
        options = dict(static)

        def run(args, arrays):
            return operation.call(*args, **arrays, **options)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run)

    @functools.wraps(operation.prepare_arguments)
    def call(*args, **kwargs):
        arrays = {key: x for key, x in kwargs.items() if isinstance(x, jax.Array)}
        if not all(map(_is_concrete, args)) or not all(map(_is_concrete, arrays.values())):
            return operation.call(*args, **kwargs)
        static = tuple((key, x) for key, x in kwargs.items() if key not in arrays)
        try:
            run = compiled(static, tuple(_types(x) for _, x in static), tuple(map(os.environ.get, _READ_WHILE_TRACING)))
        except TypeError:  # an option that is not hashable, such as a config given as a dict or a NumPy array
            return operation.call(*args, **kwargs)
        return run(args, arrays)

    parameters = list(signature.parameters.values())
    call.__signature__ = signature.replace(parameters=[*parameters, config], return_annotation=result_type(operation))
    call.__annotations__ = annotations_of(call.__signature__)
    call.__name__ = call.__qualname__ = name
    call.__module__ = "ejkernel.lax"
    return call


def _types(option: Any) -> Any:
    """The types of an option and of its contents: 1, 1.0 and True are equal, but not all of them may be valid."""
    if isinstance(option, tuple):
        return tuple(map(_types, option))
    if is_dataclass(option):
        return tuple(map(type, vars(option).values()))
    return type(option)


def _is_concrete(x: Any) -> bool:
    return x is None or (isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer))
