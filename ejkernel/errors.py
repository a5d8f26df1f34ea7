"""Errors of the library, and the format of the messages for wrong calls.

A message names the operation, the operand, the numbers and the rule, and shows the arrays that took part:

    flash_attention: k has 3 heads but q has 4; query heads must be a multiple of key/value heads
    (q: bf16[2,16,4,64], k: bf16[2,16,3,64])
"""

from typing import Any

import numpy as np

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool", "complex": "c"}


class EjkernelRuntimeError(RuntimeError):
    """A kernel implementation failed while it ran or was being built."""


class UnsupportedError(NotImplementedError):
    """No registered implementation takes this call on this target; the message lists each with its reason."""


class ConfigMissError(LookupError):
    """The autotuning policy is "error" and no tuned config is stored for this call."""


def short_type(x: Any) -> str:
    """`bf16[2,16,4,64]` for an array or anything that has a shape and a dtype."""
    name = str(np.dtype(x.dtype)) if not hasattr(x.dtype, "_rules") else str(x.dtype)
    kind = name.rstrip("0123456789")
    return f"{_SHORT.get(kind, kind)}{name[len(kind) :]}[{','.join(map(str, x.shape))}]"


def describe(**arrays: Any) -> str:
    """`(q: bf16[2,16,4,64], k: bf16[2,16,3,64])`."""
    return "(" + ", ".join(f"{name}: {short_type(x)}" for name, x in arrays.items()) + ")"


def shown(x: Any) -> str:
    """`repr(x)` on one line of at most 60 characters, for any value that a user may give."""
    try:
        text = " ".join(repr(x).split())
    except Exception:  # an int of thousands of digits, an object whose repr fails
        text = f"{a_type(x)} that cannot be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


def a_type(x: Any) -> str:
    """The name of its type with an article: "a dict", "an int"."""
    name = type(x).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def value_error(operation: str, message: str, **arrays: Any) -> ValueError:
    """A `ValueError` in the format of this module."""
    return ValueError(f"{operation}: {message}" + (f" {describe(**arrays)}" if arrays else ""))


def type_error(operation: str, message: str, **arrays: Any) -> TypeError:
    """A `TypeError` in the format of this module."""
    return TypeError(f"{operation}: {message}" + (f" {describe(**arrays)}" if arrays else ""))
