"""Functions of arrays that are one program also where they are called outside of a trace, as those of `jax.nn` are."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import jax

_READ_WHILE_TRACING = (
    "EJKERNEL_AUTOTUNE_BUDGET_S",
    "EJKERNEL_AUTOTUNE_POLICY",
    "EJKERNEL_CACHE_DIR",
    "EJKERNEL_OPS_RECORD",
    "EJKERNEL_OPS_STAMP",
    "EJKERNEL_TRITON_SMEM_LIMIT",
)


def one_program(function: Callable[..., Any], name: str, signature: inspect.Signature) -> Callable[..., Any]:
    """The function, which on concrete arrays runs a compiled program of this name.

    A call then costs little more than one of a jitted function. Programs are cached by the static options, which
    `signature` has as keyword-only parameters; with anything else than arrays for the others (a NumPy array, or a
    number that may differ in every call) the function runs as it is, like within a trace.
    """
    of_arrays = {n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}

    @functools.lru_cache(maxsize=4096)
    def compiled(static, types, environment):
        options = dict(static)

        def run(args, arrays):
            return function(*args, **arrays, **options)

        run.__name__ = run.__qualname__ = name
        return jax.jit(run)

    def call(*args, **kwargs):
        arrays = {key: x for key, x in kwargs.items() if isinstance(x, jax.Array) or key in of_arrays}
        if not all(map(_is_concrete, args)) or not all(map(_is_concrete, arrays.values())):
            return function(*args, **kwargs)
        static = tuple((key, x) for key, x in kwargs.items() if key not in arrays)
        try:
            run = compiled(static, tuple(_types(x) for _, x in static), tuple(map(os.environ.get, _READ_WHILE_TRACING)))
        except TypeError:  # an option that is not hashable, such as a config given as a dict or a NumPy array
            return function(*args, **kwargs)
        return run(args, arrays)

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
