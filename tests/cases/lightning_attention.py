"""Calls of lightning_attention. A part of the heads alone does not have the number of heads, on which decays depend."""

from ._feature import TOKENS, operand, plain
from ._recurrence import FEATURES as RECURRENCE_FEATURES
from ._recurrence import QKV, TINY, case, family, gate

CASES = (case("lightning_attention", "layer", local=False, tiny=TINY, layer_idx=1, num_layers=4, return_state=True),)

FAMILIES = (
    family("lightning_attention", "long", dict(s=300), layer_idx=0, num_layers=4),
    family("lightning_attention", "last_layer", layer_idx=31, num_layers=32),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("lightning_attention", TOKENS, QKV, layer_idx=1, num_layers=4)

FEATURES = RECURRENCE_FEATURES | {"g_gamma": operand(g_gamma=gate("h"))}
