"""The spec of operations that attend over a cache, which is the same for paged and dense ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..types import ShortRepr


@dataclass(frozen=True, repr=False)
class CacheSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        window: how many keys a query sees, its own and those before it; None for no bound.
        softcap: logits become softcap·tanh(logits / softcap).
        softmax_scale: the factor of q·kᵀ.
        num_splits: the number of parts of a sequence's keys, whose softmaxes are merged; None lets the implementation
            decide. It changes results only by rounding.
        batch_invariant: allow only implementations by which the bits of a token's result do not depend on the rest of
            the step.
    """

    window: int | None = None
    softcap: float | None = None
    softmax_scale: float = 1.0
    num_splits: int | None = None
    batch_invariant: bool = False

    @property
    def left(self) -> int | None:
        """How many keys before its own a query sees; None for all."""
        return None if self.window is None else self.window - 1


def result_dtypes(dtypes: Mapping[str, Any], spec: CacheSpec) -> dict[str, Any]:
    """The dtypes of the results: o has that of the queries, lse that of statistics."""
    del spec
    return {"o": dtypes["q"], "lse": np.promote_types(dtypes["q"], np.float32)}
