"""Calls of mean_pooling. Four devices can split the batch, two the features; tokens of no sequence hold NaN."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, S, operand, option, plain, sized

PADDING = 3


def with_padding(rng, shape):
    """NaN in the last PADDING tokens."""
    x = rng.standard_normal(shape)
    x[-PADDING:] = np.nan
    return x


def lengths(total: int):
    """cu_seqlens of uneven sequences, one of them empty, without the last PADDING tokens."""

    def values(rng, shape):
        cuts = np.sort(rng.integers(0, total - PADDING + 1, shape))
        cuts[0], cuts[2] = 0, cuts[1]
        return cuts.astype(np.int32)

    return values


def case(name, sizes, operands, result, tiny=None, **options):
    return Case("mean_pooling", name, sizes, operands, (result,), options, tiny=tiny)


CASES = (
    case("dense", dict(b=4, s=10, d=6), dict(x="b s d"), "b d", tiny=dict(b=1, s=3, d=2)),
    case(
        "packed",
        dict(s=40, d=6, n=6, m=7),
        dict(x=Operand("s d", with_padding), cu_seqlens=Operand("m", lengths(40))),
        "n d",
        chunk_size=4,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values, s=64):
    operands = dict(x=Operand("s d", values), cu_seqlens=Operand("m", lengths(s)))
    return case(name, dict(s=s, d=16, n=4, m=5), operands, "n d")


FAMILIES = (
    family("normal", lambda rng, shape: rng.standard_normal(shape)),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), s=2048),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("mean_pooling", dict(b=2, s=S, d=256, m=5), dict(x="b s d"))

FEATURES = DTYPES | {
    "packed": operand(x="s d", cu_seqlens=Operand("m", lengths(S))),
    "chunks": option(chunk_size=32),
    "one token": sized("tokens", s=1),
    "uneven": sized("features", d=100),
}
