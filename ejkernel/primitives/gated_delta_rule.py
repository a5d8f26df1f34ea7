"""gated_delta_rule: a linear recurrence with a decaying state [d, e], where a token replaces the value of its key.

    h_t = exp(g_t) · h_{t−1} + k_t u_tᵀ,    u_t = beta_t · (v_t − exp(g_t) · h_{t−1}ᵀ k_t),    o_t = scale · h_tᵀ q_t

where q and k are first divided by their norms if the spec says so. The axes of the primitives are

    b batch · s tokens · n sequences · h heads of the state · g heads of q and k · d key features · e value features
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

    q and k [b,s,g,d] and v [b,s,h,e] of one dtype; beta and the log decay g [b,s,h] of any float dtype; initial_state
    [b,n,h,d,e] float32; spans [b?,n,2] int32, the first token of each sequence and the one after its last; without it
    there is one sequence, of all tokens.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    g: Any = None
    initial_state: Any = None
    spans: Any = None


class Outputs(NamedTuple):
    """o [b,s,h,e] in q's dtype, 0 for tokens of no sequence; final_state [b,n,h,d,e] float32."""

    o: Any
    final_state: Any


@dataclass(frozen=True, repr=False)
class GatedDeltaRuleSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        softmax_scale: the factor of q.
        use_qk_l2norm: whether q and k are divided by √(Σ x² + 1e-6).
    """

    softmax_scale: float = 1.0
    use_qk_l2norm: bool = True


gated_delta_rule = Trio(
    "gated_delta_rule",
    Operands,
    Outputs,
    {
        "q": axes("b s g d"),
        "k": axes("b s g d"),
        "v": axes("b s h e"),
        "beta": axes("b s h"),
        "g": axes("b s h"),
        "initial_state": axes("b n h d e"),
        "spans": axes("b? n 2"),
        "o": axes("b s h e"),
        "final_state": axes("b n h d e"),
    },
    differentiable=("q", "k", "v", "beta", "g", "initial_state"),
    dtypes=lambda dtypes, spec: {"o": dtypes["q"], "final_state": np.promote_types(dtypes["q"], np.float32)},
    layout=Layout(advice="run it part by part, each from the state that the one before returned"),
    residuals=(),
    linear=[("v", "initial_state")],
)
