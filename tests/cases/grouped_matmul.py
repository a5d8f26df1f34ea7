"""Calls of grouped_matmul. The last rows are in no group and hold NaN; two devices can split the columns."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, operand, option, plain, sized

PADDING = 3


def sizes(total: int):
    """Uneven groups, one of them empty, of all rows except the last PADDING."""

    def values(rng, shape):
        cuts = np.sort(rng.integers(0, total - PADDING + 1, shape[0] - 2))
        made = np.diff([0, *cuts, total - PADDING])
        return np.insert(made, rng.integers(shape[0]), 0).astype(np.int32)

    return values


def one_has_all(total: int):
    """All rows are in one group."""
    return lambda rng, shape: total * np.eye(shape[0], dtype=np.int32)[rng.integers(shape[0])]


def beyond_32_bits(rng, shape):
    """The second group has all remaining rows, and the sum of the sizes exceeds int32."""
    return np.array([5, *(2**31 - 1 for _ in range(shape[0] - 1))], np.int32)


def with_padding(rng, shape):
    """NaN in the last PADDING rows."""
    x = rng.standard_normal(shape)
    x[-PADDING:] = np.nan
    return x


def small_integers(rng, shape):
    return rng.integers(-8, 8, shape, dtype=np.int8)


def up_to(most: int):
    """A scalar from 0 to `most`."""
    return lambda rng, shape: np.int32(rng.integers(most + 1))


def positive(rng, shape):
    return rng.uniform(0.5, 1.5, shape)


SIZES = dict(m=24, k=8, n=12, e=4, f=6)
TINY = dict(m=5, k=2, n=2, e=3)
LHS = Operand("m k", with_padding)


def case(name, operands, of=SIZES, tiny=None, **options):
    return Case("grouped_matmul", name, {**SIZES, **dict(of)}, operands, ("m n",), options, tiny=tiny)


CASES = (
    case("uneven", dict(lhs=LHS, rhs="e k n", group_sizes=Operand("e", sizes(24)))),
    case(
        "share_of_the_experts",
        dict(
            lhs=LHS,
            rhs="e n k",
            group_sizes=Operand("f", sizes(24)),
            group_offset=Operand("", up_to(2)),
            existing_out="m n",
            rhs_scale=Operand("e n", positive),
        ),
        transpose_rhs=True,
    ),
    case(
        "one_has_all",
        dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", one_has_all(5)), rhs_scale=Operand("", positive)),
        dict(TINY, k=4, n=4),
        tiny=TINY,
    ),
    case(
        "int8_weights",
        dict(
            lhs=LHS,
            rhs=Operand("e k n", small_integers),
            group_sizes=Operand("e", sizes(24)),
            rhs_scale=Operand("e", positive),
        ),
    ),
    case("beyond_32_bits", dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", beyond_32_bits))),
    case("none", dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", lambda rng, shape: np.zeros(shape, np.int32)))),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def large(rng, shape):
    return 30 * rng.standard_normal(shape)


def one_hot(rng, shape):
    return np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


def family(name, of=(), lhs=with_padding, rhs=None, **options):
    wide = dict(m=64, k=32, n=24, e=4) | dict(of)
    rhs = Operand("e k n", rhs) if rhs else "e k n"
    operands = dict(lhs=Operand("m k", lhs), rhs=rhs, group_sizes=Operand("e", sizes(wide["m"])))
    return case(name, operands, wide, **options)


FAMILIES = (
    family("normal"),
    family("large", lhs=large, preferred_element_type="bfloat16"),
    family("one_hot_rows", lhs=one_hot),
    family("long_uniform_rows", dict(k=512), lhs=lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

M = 300
PLAIN = plain(
    "grouped_matmul",
    dict(m=M, k=256, n=128, e=4, f=6),
    dict(lhs="m k", rhs="e k n", group_sizes=Operand("e", sizes(M))),
)

FEATURES = DTYPES | {
    "share of the groups": operand("groups", group_sizes=Operand("f", sizes(M)), group_offset=Operand("", up_to(2))),
    "existing out": operand(existing_out="m n"),
    "scale": operand("scale", rhs_scale=Operand("", positive)),
    "scale of groups": operand("scale", rhs_scale=Operand("e", positive)),
    "scale of columns": operand("scale", rhs_scale=Operand("e n", positive)),
    "transposed": Feature("rhs", operands=dict(rhs="e n k"), options=dict(transpose_rhs=True)),
    "int8": operand("rhs", rhs=Operand("e k n", small_integers)),
    "narrow result": option(preferred_element_type="bfloat16"),
    "one row": sized("rows", m=1),
    "one group": Feature("groups", dict(e=1), dict(group_sizes=Operand("e", one_has_all(M)))),
    "uneven": sized("columns", n=100, k=200),
}
