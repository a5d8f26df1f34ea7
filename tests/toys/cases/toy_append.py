"""Calls of toy_append."""

import numpy as np
import toys  # noqa: F401  which defines the operation
from cases._case import Case, Operand
from cases._feature import DTYPES, plain, sized

AT = Operand("b", lambda rng, shape: rng.integers(0, 6, shape).astype(np.int32))
OPERANDS = dict(cache="b c d", x="b d", at=AT)


def case(name, **sizes):
    return Case("toy_append", name, dict(b=4, c=6, d=8) | sizes, OPERANDS, ("b d", "b c d"))


CASES = (case("plain"),)
FAMILIES = (case("normal", c=64),)
PLAIN = plain("toy_append", dict(b=2, c=200, d=64), OPERANDS)
FEATURES = DTYPES | {"one batch": sized("batch", b=1)}
