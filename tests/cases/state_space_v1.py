"""Calls of state_space_v1: channels are the letter h."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, S, operand, option, plain, sized
from .flash_attention import lengths

SIZES = dict(b=4, s=7, h=8, d=4, n=4, m=5)
TINY = dict(b=1, s=2, h=2, d=2)


def below_0(rng, shape):
    return -np.exp(rng.standard_normal(shape))


def steps(rng, shape):
    """Steps as from a softplus; a tenth of them are 0."""
    return np.log1p(np.exp(rng.standard_normal(shape) - 1)) * rng.choice([0, 1], shape, p=[0.1, 0.9])


def arrays(batch: str) -> dict[str, str | Operand]:
    of = {name: f"{batch} s {axes}" for name, axes in dict(x="h", B="d", C="d").items()}
    return of | dict(A=Operand("h d", below_0), D="h", dt=Operand(f"{batch} s h", steps))


def case(name, operands=(), sizes=(), tiny=None, packed=False, **options) -> Case:
    batch, states = ("1", "n") if packed else ("b", "b")
    results = (f"{batch} s h", f"{states} h d")
    results = results if options.get("return_state") else results[:1]
    operands = arrays(batch) | dict(operands)
    return Case("state_space_v1", name, SIZES | dict(sizes), operands, results, options, True, tiny)


CASES = (
    case("state", dict(initial_state="b h d"), return_state=True, tiny=TINY),
    case(
        "packed",
        dict(initial_state="n h d", cu_seqlens=Operand("m", lengths(20))),
        dict(s=20),
        packed=True,
        return_state=True,
    ),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------

# Enough channels that the norm of the gradient of D, one number a channel, is not a matter of chance.
LONG = dict(b=2, s=80, h=16, d=16)

FAMILIES = (
    case("normal", sizes=LONG, return_state=True),
    case(
        "long",
        dict(A=Operand("h d", lambda rng, shape: 1e-2 * below_0(rng, shape))),
        LONG | dict(s=200),
        return_state=True,
    ),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("state_space_v1", dict(b=2, s=S, h=128, d=16, n=3, m=5), arrays("b"))

FEATURES = DTYPES | {
    "state": operand(initial_state="b h d"),
    "packed": operand("batch", **arrays("1"), cu_seqlens=Operand("m", lengths(S))),
    "final state": option(return_state=True),
    "one token": sized("tokens", s=1),
    "64 channels": sized("channels", h=64),
}
