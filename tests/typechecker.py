"""The annotations that hold in every call of every test: the import hook of jaxtyping checks them with beartype.

`conftest.py` installs it before ejkernel is imported; what users import is not checked, and imports no beartype.
"""

import functools
import operator
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

import jax
import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook

# Not `kernels._triton`, `_pallas`, `_cuda`: refs and tensors have no types, and Triton reads the source of functions.
# Not `kernels._xla`, `primitives`, `lowering`, `xla_utils`, and what `ops` asks for each key: their small functions are
# called thousands of times in a trace, with what the packages below hand on; with them a test took a fifth longer.
CHECKED = [
    f"ejkernel.{name}"
    for name in (
        "_explain",
        "_export",
        "block_masks",
        "callib",
        "checkpoint_policies",
        "errors",
        "kernels._registry",
        "lax",
        "modules",
        "ops.core",
        "ops.execution",
        "ops.recording",
        "ops.registry",
        "quantization",
        "serving",
        "types",
    )
]

NUMBERS = {int: np.integer, float: np.integer | np.floating, bool: np.bool_}
RESULT = "ret0"  # as jaxtyping names it where no other parameter has the name
# As for a type checker, an int is a float.
_checks = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecker(function):
    """Checks the calls of a function when they return, so that what is wrong and refused is refused by ejkernel itself.

    jaxtyping asks for a check of the arguments before a call, which this leaves out, and for one of arguments and
    result after it, which has the result as one parameter more. `Self` is left to pyright, for beartype knows it in
    whole classes alone.
    """
    if RESULT not in function.__code__.co_varnames:
        return function
    types = function.__annotations__
    types |= {name: Any for name, x in types.items() if Self in (x, *get_args(x))}
    types |= {name: with_numpy(x) for name, x in types.items() if name != "return"}
    return _checks(function)


def with_numpy(annotation):
    """What a parameter takes: an array of numpy, with the same dtype and axes, wherever it takes one of JAX.

    Numbers of numpy are numbers, too.
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
    """From now on, modules of CHECKED are imported with their types checked in every call."""
    install_import_hook(CHECKED, f"{__name__}.{typechecker.__name__}")
