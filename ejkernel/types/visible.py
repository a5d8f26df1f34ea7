"""Which keys a query sees by causality and a window: the band of the diagonal, and how many pairs are in it."""

import numpy as np


def band(causal: bool, window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """(left, right) of i' − left ≤ j ≤ i' + right: the window, which causality ends at the diagonal."""
    left, right = window
    return left, (0 if right is None else min(right, 0)) if causal else right


def visible_pairs(queries: int, keys: int, causal: bool, window: tuple[int | None, int | None]) -> int:
    """The number of pairs of a query i and a key j in the `band`, with i' = i + keys − queries."""
    left, right = band(causal, window)
    position = np.arange(queries) + keys - queries
    first = 0 if left is None else np.maximum(position - left, 0)
    end = keys if right is None else np.minimum(position + right + 1, keys)
    return int(np.maximum(np.broadcast_to(end - first, queries), 0).sum())
