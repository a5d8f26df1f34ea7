"""The time by which measuring may delay a call: `EJKERNEL_AUTOTUNE_BUDGET_S` seconds, by default 3.

Each call has this budget; the forward and the backward of a gradient are two calls. Lowering and compiling the
heuristic config do not count, as the call needs both in any case (and reuses a lowered GPU kernel, and what Mosaic GPU
has compiled). Values to measure with, the other configs and the measuring all count.
"""

import math
import os
from time import monotonic

from ejkernel.errors import EjkernelRuntimeError

VARIABLE = "EJKERNEL_AUTOTUNE_BUDGET_S"
DEFAULT_SECONDS = 3.0


def budget_of_environment() -> float:
    """The seconds that the environment allows for measuring a call now; 0 to let heuristics choose.

    Raises:
        ValueError: the variable is not a number of at least 0.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_SECONDS
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise ValueError(
            f"{VARIABLE} is {text!r}; it has to be a number of seconds of at least 0 (0 for no measuring, inf for all)"
        )
    return seconds


class BudgetSpent(EjkernelRuntimeError):
    """The budget of a call was spent before two of its configs could be compared. Nothing failed."""


class Deadline:
    """The moment a number of seconds, possibly infinite, from now, or from its last `restart`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Counts the seconds anew."""
        self._at = monotonic() + self._seconds

    @property
    def seconds_left(self) -> float:
        """The seconds until the moment, 0 once it has passed."""
        return max(self._at - monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return not self.seconds_left

    def timeout(self) -> float | None:
        """The seconds that are left, as functions that wait take them: None for no limit."""
        return None if math.isinf(self._at) else self.seconds_left
