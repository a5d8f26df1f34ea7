"""The loss curves of two trainings, and how far apart they are."""

from typing import NamedTuple

import numpy as np

SPAN = 50


class Tolerance(NamedTuple):
    """The largest allowed difference of two curves: in each of the first `single` steps, and then in running means."""

    single: int
    of_steps: float
    of_means: float


def running_mean(curve: np.ndarray) -> np.ndarray:
    """The mean of the last SPAN values up to each value."""
    sums = np.cumsum(np.concatenate([np.zeros(1), curve]))
    end = np.arange(1, len(curve) + 1)
    start = np.maximum(end - SPAN, 0)
    return (sums[end] - sums[start]) / (end - start)


def difference(ours: np.ndarray, theirs: np.ndarray, single: int) -> np.ndarray:
    """|ours − theirs| in the first `single` steps, and the difference of running means in later ones."""
    apart = ours - theirs
    return np.abs(np.where(np.arange(len(apart)) < single, apart, running_mean(apart)))
