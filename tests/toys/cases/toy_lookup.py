"""Calls of toy_lookup."""

import numpy as np
import toys  # noqa: F401  which defines the operation
from cases._case import Case, Operand
from cases._feature import DTYPES, plain, sized

OPERANDS = dict(x="b s d", at=Operand("b n", lambda rng, shape: rng.integers(0, 6, shape).astype(np.int32)))


def case(name, **sizes):
    return Case("toy_lookup", name, dict(b=4, s=6, d=8, n=3) | sizes, OPERANDS, ("b n d",))


CASES = (case("plain"),)
FAMILIES = (case("normal", s=64),)
PLAIN = plain("toy_lookup", dict(b=2, s=200, d=64, n=5), OPERANDS)
FEATURES = DTYPES | {"one place": sized("places", n=1)}
