"""Calls of toy_wave."""

import toys  # noqa: F401  which defines the operation
from cases._case import Case
from cases._feature import DTYPES, option, plain, sized

OPERANDS = dict(x="b s d", w="b d")


def case(name, sizes=(), tiny=None, **options):
    return Case("toy_wave", name, dict(b=4, s=6, d=8) | dict(sizes), OPERANDS, ("b s d",), options, tiny=tiny)


CASES = (case("plain", tiny=dict(b=1, s=2, d=2)), case("rate", rate=0.5))
FAMILIES = (case("normal", dict(s=64)),)
PLAIN = plain("toy_wave", dict(b=2, s=200, d=64), OPERANDS)
FEATURES = DTYPES | {"rate": option(rate=0.5), "one token": sized("tokens", s=1)}
