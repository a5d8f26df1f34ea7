"""Calls of toy_beat."""

import jax.numpy as jnp
import toys  # noqa: F401  which defines the operation
from cases._case import Case
from cases._feature import DTYPES, option, plain, sized

OPERANDS = dict(x="b s d", w="b d")


def formula(x, w, rate=1.0):
    return (jnp.sin(x) + jnp.sin(rate * x)) * w[:, None]


def case(name, sizes=(), tiny=None, **options):
    sizes = dict(b=4, s=6, d=8) | dict(sizes)
    of = dict(composed_formula=formula, composed_split=("b", "d"), tiny=tiny)
    return Case("toy_beat", name, sizes, OPERANDS, ("b s d",), options, **of)


CASES = (case("plain", tiny=dict(b=1, s=2, d=2), rate=0.75),)
FAMILIES = (case("normal", dict(s=64), rate=0.75),)
PLAIN = plain("toy_beat", dict(b=2, s=200, d=64), OPERANDS)
FEATURES = DTYPES | {"rate": option(rate=0.5), "one token": sized("tokens", s=1)}
