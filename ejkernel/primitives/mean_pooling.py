"""mean_pooling: the mean of the tokens of each segment.

    b batch · s tokens · d features · n segments

`b? …` may have size 1 and is then broadcast. Every feature is computed by itself, so that features may be split over
devices like the batch.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..types import ShortRepr
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    x [b,s,d]; segments [b?,n,2] int32, the first token of each segment and the one after its last, where the next one
    begins. Without segments all tokens are one, n = 1.
    """

    x: Any
    segments: Any = None


class Outputs(NamedTuple):
    """o [b,n,d] in x's dtype."""

    o: Any


@dataclass(frozen=True, repr=False)
class MeanPoolingSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        chunk_size: tokens that are summed at a time, which changes only the order of summation; None leaves it to the
            config.
    """

    chunk_size: int | None = None


mean_pooling = Trio(
    "mean_pooling",
    Operands,
    Outputs,
    {"x": axes("b s d"), "segments": axes("b? n 2"), "o": axes("b n d")},
    differentiable=("x",),
    dtypes=lambda dtypes, spec: {"o": dtypes["x"]},
    layout=Layout(split=("b", "d"), group=None),
    residuals=(),
    linear=[("x",)],
)
