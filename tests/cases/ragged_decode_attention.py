"""Steps of ragged_decode_attention, with sequences of one key, of none, and of all."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized


def starts(rng, shape):
    """Starts at the first key, and later ones."""
    return rng.integers(-1, 5, shape).astype(np.int32)


def ends(most: int):
    """Ends at no key, before some starts, at one, all, more than there are, and others."""

    def values(rng, shape):
        found = rng.integers(0, most + 1, shape)
        found[:4] = rng.permutation([0, 5, most, most + 3])[: len(found)]
        return found.astype(np.int32)

    return values


SIZES = dict(b=4, h=4, g=2, t=17, d=8, e=12)
OPERANDS = dict(
    q="b h d",
    k="b t g d",
    v="b t g e",
    sequence_start=Operand("b", starts),
    sequence_end=Operand("b", ends(17)),
)


def case(name, sizes=(), operands=(), **options):
    results = ("b h e", "b h") if options.get("return_lse") else ("b h e",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("ragged_decode_attention", name, sizes, operands, results, options)


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5, num_splits=3),
    case("one_kv_head", dict(g=1), return_lse=True),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values=lambda rng, shape: rng.standard_normal(shape), length=60):
    """Eight sequences of random lengths."""
    arrays = {n: Operand(of, values) for n, of in dict(q="b h d", k="b t g d", v="b t g e").items()}
    sizes = dict(b=8, t=length, d=64, e=64)
    return case(name, sizes, arrays | dict(sequence_end=Operand("b", ends(length))), return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), 2000),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("ragged_decode_attention", dict(b=4, h=4, g=2, t=200, d=128, e=128, x=2), OPERANDS)

FEATURES = DTYPES | {
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "static scale": option(softmax_scale=0.3),
    "splits": option(num_splits=2),
    "lse": option(return_lse=True),
    "one sequence": sized("sequences", b=1),
    "one key": sized("keys", t=1),
    "one head": sized("heads", h=1, g=1),
    "other values": sized("features", e=64),
}
