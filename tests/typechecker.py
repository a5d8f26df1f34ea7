"""In the tests, the import hook of jaxtyping checks annotations in every call with beartype.

`conftest.py` installs it before ejkernel is imported; users' imports are not checked, and load no beartype.
"""

import functools
import operator
from pathlib import Path
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

import jax
import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

# Not `kernels._triton`, `_pallas`, `_cuda`: refs and tensors have no types, and Triton reads the source of functions.
# Not `kernels._xla`, `primitives`, `lowering`, `xla_utils`, and what `ops` asks for each key: their small functions are
# called thousands of times in a trace, with what the packages below hand on; with them a test took a fifth longer.
PACKAGES = ("callib", "lax", "modules", "ops/core", "ops/execution", "quantization", "serving", "types")
MODULES = ("_explain", "_export", "block_masks", "checkpoint_policies", "errors", "ops/recording", "ops/registry")
# Nor these and `kernels._registry`, for the same reason: they had three quarters of all calls.
OFTEN_CALLED = ("modules/operations/_arguments", "types/target")

LIBRARY = Path(__file__).parents[1] / "ejkernel"
FILES = (file.relative_to(LIBRARY) for of in PACKAGES for file in (LIBRARY / of).rglob("*.py"))
NAMES = {*MODULES, *(str(file.with_suffix("")) for file in FILES if file.stem != "__init__")} - {*OFTEN_CALLED}
CHECKED = sorted(f"ejkernel.{name.replace('/', '.')}" for name in NAMES)

NUMBERS = {int: np.integer, float: np.integer | np.floating, bool: np.bool_}
RESULT = "ret0"  # as jaxtyping names it where no other parameter has the name
# As in type checkers, int is accepted for float.
_checks = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecker(function):
    """Checks a function's call when it returns, so that wrong calls are rejected by ejkernel's own errors.

    jaxtyping asks for a check of the arguments before a call, which is omitted here, and for one of arguments and
    result after it, with the result as one more parameter. `Self` is left to pyright, since beartype supports it only
    in whole classes.
    """
    if RESULT not in function.__code__.co_varnames:
        return function
    types = function.__annotations__
    types |= {name: Any for name, x in types.items() if Self in (x, *get_args(x))}
    types |= {name: with_numpy(x) for name, x in types.items() if name != "return"}
    return _checks(function)


def with_numpy(annotation):
    """The type that a parameter accepts: where it takes a JAX array, also one of NumPy, of the same dtype and axes.

    NumPy numbers are accepted as numbers, too.
    """
    if isinstance(annotation, type) and annotation in NUMBERS:
        return annotation | NUMBERS[annotation]
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray) and annotation.array_type is jax.Array:
        return annotation.dtype[jax.Array | np.ndarray, annotation.dim_str]
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return functools.reduce(operator.or_, map(with_numpy, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return tuple[tuple(map(with_numpy, get_args(annotation)))]
    return annotation


def check_all_calls():
    """From now on, modules of CHECKED are imported with type checks in every call."""
    install_import_hook(CHECKED, f"{__name__}.{typechecker.__name__}")
