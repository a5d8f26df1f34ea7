"""state_space_v1: the selective state space of Mamba, in which every channel has a state [d] with decays of its own.

    h_t = exp(dt_t · A) ∘ h_{t−1} + dt_t · x_t · B_t,    y_t = C_t · h_t + D · x_t

Of the contract of the primitives:

    b batch · s tokens · n sequences · h channels · d numbers of the state of a channel

`b?` may have size 1 and is then broadcast.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import ShortRepr
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    x and dt [b,s,h], A [b?,h,d], B and C [b,s,d], D [b?,h], of float dtypes; initial_state [b,n,h,d] float32; spans
    [b?,n,2] int32, the first token of each sequence and the one after its last; without it there is one sequence.
    """

    x: Any
    A: Any
    B: Any
    C: Any
    dt: Any
    D: Any = None
    initial_state: Any = None
    spans: Any = None


class Outputs(NamedTuple):
    """o [b,s,h] in x's dtype, 0 for tokens of no sequence; final_state [b,n,h,d] float32."""

    o: Any
    final_state: Any


@dataclass(frozen=True, repr=False)
class StateSpaceSpec(ShortRepr):
    """What is computed is said by the arrays alone."""


def dtypes_of_outputs(dtypes: Any, spec: StateSpaceSpec) -> dict[str, Any]:
    """y in x's dtype, the state in that of statistics."""
    del spec
    return {"o": dtypes["x"], "final_state": np.promote_types(dtypes["x"], np.float32)}


DIFFERENTIABLE = ("x", "A", "B", "C", "dt", "D", "initial_state")
LINEAR = [("x", "initial_state"), ("B", "D", "initial_state"), ("C", "D")]
ADVICE = "run it part by part, each from the state that the one before returned"

state_space_v1 = Trio(
    "state_space_v1",
    Operands,
    Outputs,
    {
        "x": axes("b s h"),
        "A": axes("b? h d"),
        "B": axes("b s d"),
        "C": axes("b s d"),
        "dt": axes("b s h"),
        "D": axes("b? h"),
        "initial_state": axes("b n h d"),
        "spans": axes("b? n 2"),
        "o": axes("b s h"),
        "final_state": axes("b n h d"),
    },
    differentiable=DIFFERENTIABLE,
    dtypes=dtypes_of_outputs,
    layout=Layout(split=("b", "h"), group=None, advice=ADVICE),
    residuals=(),
    linear=LINEAR,
)
