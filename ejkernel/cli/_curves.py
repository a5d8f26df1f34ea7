"""The loss curves of two trainings, and how far apart they are."""

import numpy as np

SPAN = 50


def running_mean(curve: np.ndarray) -> np.ndarray:
    """The mean of each value and those before it, SPAN at most in all."""
    sums = np.cumsum(np.concatenate([np.zeros(1), curve]))
    end = np.arange(1, len(curve) + 1)
    start = np.maximum(end - SPAN, 0)
    return (sums[end] - sums[start]) / (end - start)


def difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Of the first SPAN steps that of the two losses, of later ones that of their running means."""
    apart = ours - theirs
    return np.abs(np.where(np.arange(len(apart)) < SPAN, apart, running_mean(apart)))
