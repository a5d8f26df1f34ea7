"""Calls of gla."""

import numpy as np

from ._feature import TOKENS, plain
from ._recurrence import FEATURES as RECURRENCE_FEATURES
from ._recurrence import QKV, TINY, case, family, gate, remembering

CASES = (case("gla", "state", dict(gk=gate("b s h d"), initial_state="b h d e"), return_state=True, tiny=TINY),)

FAMILIES = (
    family("gla", "slow", of=dict(gk=("b s h d", remembering(30)))),
    family("gla", "fast", of=dict(gk=("b s h d", lambda rng, shape: np.full(shape, -10.0)))),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("gla", TOKENS, QKV | dict(gk=gate("b s h d")))

FEATURES = RECURRENCE_FEATURES
