"""Calls of gated_delta_rule: four heads of the state on two of queries and keys."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, S, operand, option, plain, sized
from ._recurrence import SIZES, TINY, gate, remembering
from .flash_attention import lengths


def between_0_and_1(rng, shape):
    """The fraction of the state at a key that is replaced; in a tenth of the cases 1, and in a tenth 0."""
    return np.clip(rng.uniform(-0.1, 1.1, shape), 0, 1)


def arrays(batch: str) -> dict[str, str | Operand]:
    return dict(
        q=f"{batch} s g d", k=f"{batch} s g d", v=f"{batch} s h e", beta=Operand(f"{batch} s h", between_0_and_1)
    )


def case(name, operands=(), sizes=(), tiny=None, packed=False, **options) -> Case:
    batch, states = ("1", "n") if packed else ("b", "b")
    results = (f"{batch} s h e", f"{states} h d e")
    results = results if options.get("return_state") else results[:1]
    operands = arrays(batch) | dict(operands)
    return Case("gated_delta_rule", name, {**SIZES, **dict(sizes)}, operands, results, options, True, tiny)


CASES = (
    case("state", dict(g=gate("b s h"), initial_state="b h d e"), dict(s=8), return_state=True, tiny=TINY),
    case(
        "packed",
        dict(g=gate("1 s h"), initial_state="n h d e", cu_seqlens=Operand("m", lengths(20))),
        dict(s=20, n=4, m=5),
        packed=True,
        return_state=True,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, gates=remembering(30), sizes=(), **values) -> Case:
    """Calls longer than a chunk; `values` of q, k and v if they are not normal."""
    operands = {of: Operand(arrays("b")[of], how) for of, how in values.items()} | dict(g=Operand("b s h", gates))
    return case(name, operands, dict(b=2, s=80, h=2, g=1, d=16, e=16) | dict(sizes), return_state=True)


FAMILIES = (
    family("normal"),
    family("large", v=lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", k=lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long", remembering(1000), dict(s=200)),
    family("long_uniform", remembering(1e5), dict(s=400), k=lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("gated_delta_rule", TOKENS, arrays("b"))

FEATURES = DTYPES | {
    "gate": operand(g=gate("b s h")),
    "state": operand(initial_state="b h d e"),
    "packed": operand("batch", **arrays("1"), cu_seqlens=Operand("m", lengths(S))),
    "scale": option(softmax_scale=0.3),
    "keys as they are": option(use_qk_l2norm=False),
    "final state": option(return_state=True),
    "one token": sized("tokens", s=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=192),
}
