"""ragged_gated_delta_rule: the gated delta rule over the packed tokens of a step, with states in a pool.

    b batch · t tokens of the step · h heads of the state · g heads of q and k · d key features · e value features
    p states of the pool · n sequences · m = n + 1

The batch axis of the primitive exists for `vmap`: the public operation has none.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q and k [b,t,g,d] and v [b,t,h,e] of one dtype; beta [b,t,h] and states [b,p,h,d,e] of any float dtype;
    query_start_loc [b,m] and state_indices [b,n] int32; the log decay g [b,t,h] of any float dtype.
    """

    q: Any
    k: Any
    v: Any
    beta: Any
    states: Any
    query_start_loc: Any
    state_indices: Any
    g: Any = None


class Outputs(NamedTuple):
    """o [b,t,h,e] in q's dtype, 0 for tokens of no sequence; new_states in the place of states."""

    o: Any
    new_states: Any


ragged_gated_delta_rule = ForwardOnly(
    "ragged_gated_delta_rule",
    Operands,
    Outputs,
    {
        "q": axes("b t g d"),
        "k": axes("b t g d"),
        "v": axes("b t h e"),
        "beta": axes("b t h"),
        "states": axes("b p h d e"),
        "query_start_loc": axes("b m"),
        "state_indices": axes("b n"),
        "g": axes("b t h"),
        "o": axes("b t h e"),
        "new_states": axes("b p h d e"),
    },
    dtypes=lambda dtypes, spec: {"o": dtypes["q"]},
    instead="train with gated_delta_rule",
    layout=Layout(advice="shard the heads"),
    in_place={"new_states": "states"},
)
