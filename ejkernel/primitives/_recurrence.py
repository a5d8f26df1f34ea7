"""The linear recurrence that recurrent, gla and lightning_attention compute.

With a state [d, e] for each head,

    h_t = diag(exp(gk_t)) · h_{t−1} · diag(exp(gv_t)) · exp(g_t + g_gamma) + k_t v_tᵀ,    o_t = (scale · q_t)ᵀ h_t

The primitives compute what the public operations do, but every array has a batch axis (of size 1 if it does not vary),
so that one table of axes determines how to check shapes, fold a mapped axis, and shard:

    b batch · s tokens · n sequences · h query heads · g key/value heads · d query/key features · e value features

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

    q [b,s,h,d], k [b,s,g,d], v [b,s,g,e] of one dtype; log decays of any float dtype: g [b,s,h], gk [b,s,h,d],
    gv [b,s,h,e]; g_gamma [b?,h] and initial_state [b,n,h,d,e] float32; spans [b?,n,2] int32, the first token of each
    sequence and the one after its last; without it there is one sequence, of all tokens.
    """

    q: Any
    k: Any
    v: Any
    g: Any = None
    gk: Any = None
    gv: Any = None
    g_gamma: Any = None
    initial_state: Any = None
    spans: Any = None


class Outputs(NamedTuple):
    """o [b,s,h,e] in q's dtype, 0 for tokens of no sequence; final_state [b,n,h,d,e] float32."""

    o: Any
    final_state: Any


@dataclass(frozen=True, repr=False)
class RecurrenceSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        softmax_scale: the factor of q.
        reverse: time runs from the last token of a sequence, which follows the initial state, to the first.
        return_state: the final state is a result in float32; otherwise it may be rounded like o.
        return_output: o is a result; otherwise it is arbitrary, and implementations need not compute it.
    """

    softmax_scale: float = 1.0
    reverse: bool = False
    return_state: bool = True
    return_output: bool = True


TABLE = {
    "q": axes("b s h d"),
    "k": axes("b s g d"),
    "v": axes("b s g e"),
    "g": axes("b s h"),
    "gk": axes("b s h d"),
    "gv": axes("b s h e"),
    "g_gamma": axes("b? h"),
    "initial_state": axes("b n h d e"),
    "spans": axes("b? n 2"),
    "o": axes("b s h e"),
    "final_state": axes("b n h d e"),
}


def recurrence(name: str) -> Trio:
    """The primitives of an operation that is a linear recurrence."""
    return Trio(
        name,
        Operands,
        Outputs,
        TABLE,
        differentiable=("q", "k", "v", "g", "gk", "gv", "g_gamma", "initial_state"),
        dtypes=lambda dtypes, spec: {"o": dtypes["q"], "final_state": np.promote_types(dtypes["q"], np.float32)},
        layout=Layout(advice="give axis_name inside jax.shard_map"),
        residuals=(),
        linear=[("q",), ("k", "initial_state"), ("v", "initial_state")],
    )
