"""Calls of recurrent, which together have every decay, with a state and packed sequences."""

from ._case import Operand
from ._feature import TOKENS, operand, plain
from ._recurrence import FEATURES as RECURRENCE_FEATURES
from ._recurrence import PACKED, QKV, TINY, case, family, gate, remembering
from .flash_attention import lengths

CASES = (
    case("recurrent", "decays_by_feature_reversed", dict(gk=gate("b s h d"), gv=gate("b s h e")), reverse=True),
    case("recurrent", "decays_by_head", dict(g=gate("b s h"), g_gamma=gate("h")), return_state=True, tiny=TINY),
    case(
        "recurrent",
        "packed",
        dict(initial_state="n h d e", cu_seqlens=Operand("m", lengths(20))),
        dict(s=20, n=4, m=5),
        of=PACKED,
        return_state=True,
    ),
)

FAMILIES = (
    family(
        "recurrent",
        "decays_of_every_kind",
        of=dict(
            g=("b s h", remembering(8)),
            gk=("b s h d", remembering(8)),
            gv=("b s h e", remembering(8)),
            g_gamma=("h", remembering(8)),
        ),
    ),
    family("recurrent", "no_decay", dict(s=200)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("recurrent", TOKENS, QKV)

FEATURES = RECURRENCE_FEATURES | {
    "g": operand(g=gate("b s h")),
    "gk": operand(gk=gate("b s h d")),
    "gv": operand(gv=gate("b s h e")),
    "g_gamma": operand(g_gamma=gate("h")),
}
