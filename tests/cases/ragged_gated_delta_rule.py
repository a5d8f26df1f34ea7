"""Steps of ragged_gated_delta_rule with prefill, decode, and a sequence without tokens. Two devices split the heads."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, option, plain, sized
from ._recurrence import gate, remembering
from .gated_delta_rule import between_0_and_1
from .ragged_page_attention_v3 import query_start_loc


def places(rng, shape):
    """A different state of the pool for each sequence; the pool has twice as many."""
    return rng.permutation(2 * shape[0])[: shape[0]].astype(np.int32)


SIZES = dict(t=10, h=4, g=2, d=8, e=16, p=8, n=4, m=5)
OPERANDS = dict(
    q="t g d",
    k="t g d",
    v="t h e",
    beta=Operand("t h", between_0_and_1),
    g=gate("t h"),
    states="p h d e",
    query_start_loc=Operand("m", query_start_loc),
    state_indices=Operand("n", places),
)


def case(name, sizes=(), operands=(), **options):
    operands = OPERANDS | dict(operands)
    return Case("ragged_gated_delta_rule", name, SIZES | dict(sizes), operands, ("t h e", "p h d e"), options)


CASES = (case("mixed"),)

# --- For the tests of precision ---------------------------------------------------------------------------------------


LENGTHS = (60, 1, 0, 39)

FAMILIES = (
    case(
        "normal",
        dict(t=100, d=16),
        dict(
            g=Operand("t h", remembering(30)),
            query_start_loc=Operand("m", lambda rng, shape: np.cumsum([0, *LENGTHS]).astype(np.int32)),
        ),
    ),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("ragged_gated_delta_rule", dict(t=64, h=4, g=2, d=64, e=64, p=8, n=4, m=5), OPERANDS)

FEATURES = DTYPES | {
    "scale": option(softmax_scale=0.3),
    "keys as they are": option(use_qk_l2norm=False),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=192),
}
