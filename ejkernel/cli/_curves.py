"""The loss curves of two trainings, and how far apart they are."""

from typing import NamedTuple

import numpy as np

SPAN = 50


class Tolerance(NamedTuple):
    """By how much two curves may differ: in each of so many `single` steps, and after them in their running means."""

    single: int
    of_steps: float
    of_means: float


def running_mean(curve: np.ndarray) -> np.ndarray:
    """The mean of each value and those before it, SPAN at most in all."""
    sums = np.cumsum(np.concatenate([np.zeros(1), curve]))
    end = np.arange(1, len(curve) + 1)
    start = np.maximum(end - SPAN, 0)
    return (sums[end] - sums[start]) / (end - start)


def difference(ours: np.ndarray, theirs: np.ndarray, single: int) -> np.ndarray:
    """Of the first `single` steps that of the two losses, of later ones that of their running means."""
    apart = ours - theirs
    return np.abs(np.where(np.arange(len(apart)) < single, apart, running_mean(apart)))
