"""What is computed by operations that attend over a cache: the same for pages and for a dense one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..types import ShortRepr


@dataclass(frozen=True, repr=False)
class CacheSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        window: a query at position i sees keys i − left ≤ j ≤ i, `left = window − 1`; None is unbounded.
        softcap: logits become softcap·tanh(logits / softcap).
        softmax_scale: the factor of q·kᵀ.
        num_splits: into how many parts the keys of a sequence are cut, which are merged by their lse; None leaves it to
            the implementation. It changes no result beyond its rounding.
        batch_invariant: only implementations that give a token the same bits whatever else is in the step.
    """

    window: int | None = None
    softcap: float | None = None
    softmax_scale: float = 1.0
    num_splits: int | None = None
    batch_invariant: bool = False


def result_dtypes(dtypes: Mapping[str, Any], spec: CacheSpec) -> dict[str, Any]:
    """o in the dtype of the queries, lse in that of statistics."""
    del spec
    return {"o": dtypes["q"], "lse": np.promote_types(dtypes["q"], np.float32)}
