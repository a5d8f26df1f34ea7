"""state_space_v2: the state space of Mamba-2, in which a head has a state [e, d] that decays as a whole.

    h_t = exp(dt_t · A) · h_{t−1} + dt_t · x_t B_tᵀ,    y_t = h_t C_t + D · x_t

Of the contract of the primitives:

    b batch · s tokens · n sequences · h heads · g groups of heads with the same B and C · e features of a head
    d numbers of the state for each of them

`b?` may have size 1 and is then broadcast.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._sharding import Layout
from ._trio import Trio
from .state_space_v1 import ADVICE, DIFFERENTIABLE, LINEAR, StateSpaceSpec, dtypes_of_outputs

__all__ = ["Operands", "Outputs", "StateSpaceSpec", "state_space_v2"]


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    x [b,s,h,e], A and D [b?,h], B and C [b,s,g,d], dt [b,s,h], of float dtypes; initial_state [b,n,h,e,d] float32;
    spans [b?,n,2] int32, the first token of each sequence and the one after its last; without it there is one sequence.
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
    """o [b,s,h,e] in x's dtype, 0 for tokens of no sequence; final_state [b,n,h,e,d] float32."""

    o: Any
    final_state: Any


state_space_v2 = Trio(
    "state_space_v2",
    Operands,
    Outputs,
    {
        "x": axes("b s h e"),
        "A": axes("b? h"),
        "B": axes("b s g d"),
        "C": axes("b s g d"),
        "dt": axes("b s h"),
        "D": axes("b? h"),
        "initial_state": axes("b n h e d"),
        "spans": axes("b? n 2"),
        "o": axes("b s h e"),
        "final_state": axes("b n h e d"),
    },
    differentiable=DIFFERENTIABLE,
    dtypes=dtypes_of_outputs,
    layout=Layout(advice=ADVICE),
    residuals=(),
    linear=LINEAR,
)
