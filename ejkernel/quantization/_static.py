"""Checks of static arguments of quantisation."""

from typing import Any

import numpy as np

from ..errors import shown, type_error, value_error


def int_within(operation: str, name: str, x: Any, least: int, most: int | None = None) -> int:
    """An int from `least` to `most`, or at least `least`; raises for anything else."""
    rule = f"an int of at least {least}" if most is None else f"an int from {least} to {most}"
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise type_error(operation, f"{name} is {shown(x)}; it must be {rule}")
    if x < least or (most is not None and x > most):
        raise value_error(operation, f"{name} is {shown(x)}; it must be {rule}")
    return int(x)
