"""How long measuring may hold up a call: `EJKERNEL_AUTOTUNE_BUDGET_S` seconds, by default 3."""

import math
import os
from time import monotonic

VARIABLE = "EJKERNEL_AUTOTUNE_BUDGET_S"
DEFAULT_SECONDS = 3.0


def budget_of_environment() -> float:
    """Seconds that the environment allows for the configs of a call now; 0 where heuristics are to choose them.

    Raises:
        ValueError: the variable holds no number of at least 0.
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


class Deadline:
    """A moment so many seconds from now, which may be infinitely many."""

    def __init__(self, seconds: float):
        self._at = monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return monotonic() >= self._at

    def timeout(self, share: float = 1.0) -> float | None:
        """The share of the seconds that are left, as functions that wait take it: None for no limit."""
        return None if math.isinf(self._at) else share * max(self._at - monotonic(), 0.0)
