"""Shared by cases of linear recurrences: four query heads on two key/value heads."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, S, operand, option, sized
from .flash_attention import lengths, scalar

SIZES = dict(b=4, s=7, h=4, g=2, d=8, e=16)
TINY = dict(b=1, s=3, h=2, g=1, d=2, e=2)
QKV = dict(q="b s h d", k="b s g d", v="b s g e")
PACKED = dict(q="1 s h d", k="1 s g d", v="1 s g e")


def decays(rng, shape):
    """Log decays of at most 0; some forget all but 5e-5 of the state, some nothing."""
    return -np.abs(rng.standard_normal(shape)) * rng.choice([0, 1, 10], shape, p=[0.1, 0.8, 0.1])


def gate(axes: str) -> Operand:
    return Operand(axes, decays)


def case(operation, name, operands=(), sizes=(), of=QKV, local=True, tiny=None, **options) -> Case:
    batch = "1" if of is PACKED else "b"
    results = (f"{batch} s h e", "n h d e" if of is PACKED else "b h d e")
    results = results if options.get("return_state") else results[:1]
    sizes, operands = {**SIZES, **dict(sizes)}, {**of, **dict(operands)}
    return Case(operation, name, sizes, operands, results, options, local, tiny)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def remembering(tokens: float):
    """Gates by which the state is forgotten in about `tokens` tokens."""
    return lambda rng, shape: -np.abs(rng.standard_normal(shape)) / tokens


def family(operation, name, sizes=(), of=(), **options) -> Case:
    """A longer call; `of` gives axes and values of the gates by name."""
    sizes = {**dict(b=2, s=80, h=2, g=1, d=16, e=16), **dict(sizes)}
    operands = {name: Operand(*gate) for name, gate in dict(of).items()}
    return case(operation, name, operands, sizes, return_state=True, **options)


# --- For the tests of pairs of features -------------------------------------------------------------------------------

PACKED_FEATURE = PACKED | dict(cu_seqlens=Operand("m", lengths(S)))

FEATURES = DTYPES | {
    "state": operand(initial_state="b h d e"),
    "packed": operand("batch", **PACKED_FEATURE),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
    "reverse": option(reverse=True),
    "final state": option(return_state=True),
    "one token": sized("tokens", s=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=192),
}
