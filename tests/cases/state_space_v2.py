"""Calls of state_space_v2: four heads with two groups of B and C."""

from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, S, operand, option, plain, sized
from .flash_attention import lengths
from .state_space_v1 import below_0, steps

SIZES = dict(b=4, s=7, h=4, g=2, d=8, e=16, n=4, m=5)
TINY = dict(b=1, s=2, h=2, g=1, d=2, e=2)


def arrays(batch: str) -> dict[str, str | Operand]:
    of = {name: f"{batch} s {axes}" for name, axes in dict(x="h e", B="g d", C="g d").items()}
    return of | dict(A=Operand("h", below_0), D="h", dt=Operand(f"{batch} s h", steps))


def case(name, operands=(), sizes=(), tiny=None, packed=False, **options) -> Case:
    batch, states = ("1", "n") if packed else ("b", "b")
    results = (f"{batch} s h e", f"{states} h e d")
    results = results if options.get("return_state") else results[:1]
    operands = arrays(batch) | dict(operands)
    return Case("state_space_v2", name, SIZES | dict(sizes), operands, results, options, True, tiny)


CASES = (
    case("state", dict(initial_state="b h e d"), return_state=True, tiny=TINY),
    case(
        "packed",
        dict(initial_state="n h e d", cu_seqlens=Operand("m", lengths(20))),
        dict(s=20),
        packed=True,
        return_state=True,
    ),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------

# Enough heads that the norm of a gradient of A or D, one number a head, is not a matter of chance.
LONG = dict(b=2, s=80, h=16, g=2, d=16, e=16)

FAMILIES = (
    case("normal", sizes=LONG, return_state=True),
    case(
        "long",
        dict(A=Operand("h", lambda rng, shape: 1e-2 * below_0(rng, shape))),
        LONG | dict(s=200),
        return_state=True,
    ),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("state_space_v2", TOKENS, arrays("b"))

FEATURES = DTYPES | {
    "state": operand(initial_state="b h e d"),
    "packed": operand("batch", **arrays("1"), cu_seqlens=Operand("m", lengths(S))),
    "final state": option(return_state=True),
    "one token": sized("tokens", s=1),
    "one head": sized("heads", h=1, g=1),
}
