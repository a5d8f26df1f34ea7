"""Calls of quantized_matmul. Devices split the batch and the columns of the product: g groups of 16, c in all, or n.

u are the groups of a row of codes, p the words of each: if u are groups of columns, both are split with the columns.
"""

from dataclasses import dataclass, replace

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, operand, plain, sized


@dataclass(frozen=True, eq=False)
class Packed(Case):
    """A case whose words p, columns c and features follow from its groups."""

    def resized(self, sizes):
        sizes = {**self.sizes, **sizes}
        if self.options.get("transpose"):
            sizes["u"] = sizes["k"] * self.sizes["u"] // self.sizes["k"]
        groups = "g" if "g" in sizes else "u"
        follow = {n: sizes[groups] * self.sizes[n] // self.sizes[groups] for n in "pc" if n in sizes}
        return replace(self, sizes=sizes | follow)


def codes(rng, shape):
    """Random bits."""
    return rng.integers(2**32, size=shape, dtype=np.uint32)


def small_codes(rng, shape):
    """Codes of e4m3 below 2, none of which is NaN."""
    return codes(rng, shape) & np.uint32(0xBFBFBFBF)


def exponents(rng, shape):
    """Exponents for mxfp4 and mxfp8."""
    return rng.integers(-3, 3, shape).astype(np.int8).view(np.uint8)


def e4m3(rng, shape):
    """Scales from 0.5 to 2, for nvfp4 and nvfp8."""
    return rng.integers(0x30, 0x40, shape).astype(np.uint8)


def positive(rng, shape):
    return rng.uniform(0.2, 0.6, shape)


def middle(rng, shape):
    """Zeros in the middle of the range of a few bits."""
    return rng.uniform(1, 3, shape)


SIZES = dict(b=4, s=5)
TINY = dict(b=1, s=2, k=2, g=1, c=16)
W, SCALES, ZEROS = Operand("k g", codes), Operand("k g", positive), Operand("k g", middle)


def case(name, sizes, operands, result, split_with=(), tiny=None, **options):
    operands = dict(x="b s k") | operands
    sizes = SIZES | sizes
    return Packed("quantized_matmul", name, sizes, operands, (result,), options, split_with=dict(split_with), tiny=tiny)


def few_rows(bits, group, transpose, rows, features, columns):
    """A call of few rows in two batches."""
    of_codes, codes_of_row = (columns, features) if transpose else (features, columns)
    sizes = dict(b=2, s=rows, k=features, r=of_codes, p=codes_of_row * bits // 32, u=codes_of_row // group)
    operands = {
        n: Operand(f"r {axis}", of)
        for n, axis, of in (("w", "p", codes), ("scales", "u", positive), ("zeros", "u", middle))
    }
    options = dict(bits=bits, group_size=group, transpose=transpose)
    return case(f"{bits}-{group}-{transpose}-{rows}", sizes, operands, "b s c", **options)


COLUMNS = dict(c="g", p="g", u="g")

CASES = (
    case(
        "two_bits",
        dict(k=8, g=4, c=64),
        dict(w=W, scales=SCALES, zeros=ZEROS),
        "b s c",
        dict(c="g"),
        TINY,
        bits=2,
        group_size=16,
    ),
    case(
        "transposed",
        dict(k=32, n=4, p=4, u=2),
        dict(w=Operand("n p", codes), scales=Operand("n u", positive), zeros=Operand("n u", middle)),
        "b s n",
        tiny=dict(b=1, s=2, k=16, n=2, p=2, u=1),
        group_size=16,
        transpose=True,
    ),
    case(
        "nf4",
        dict(k=8, p=8, u=4, c=64),
        dict(w=Operand("k p", codes), scales=Operand("k u", positive)),
        "b s c",
        COLUMNS,
        mode="nf4",
        group_size=16,
    ),
    case(
        "mxfp8_transposed",
        dict(k=64, n=4, p=16, u=2),
        dict(w=Operand("n p", small_codes), scales=Operand("n u", exponents)),
        "b s n",
        mode="mxfp8",
        transpose=True,
    ),
    case(
        "nvfp4",
        dict(k=8, p=8, u=4, c=64),
        dict(w=Operand("k p", codes), scales=Operand("k u", e4m3)),
        "b s c",
        COLUMNS,
        mode="nvfp4",
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def large(rng, shape):
    return 30 * rng.standard_normal(shape)


def one_hot(rng, shape):
    return np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


def uniform(rng, shape):
    return 1 + 1e-3 * rng.standard_normal(shape)


def family(name, x, k=32, **options):
    """Four bits in groups of 16 columns."""
    operands = dict(x=Operand("s k", x), w=Operand("k p", codes), scales=Operand("k u", positive))
    if "mode" not in options:
        operands["zeros"] = Operand("k u", lambda rng, shape: rng.uniform(6, 9, shape))
    return case(name, dict(s=24, k=k, p=8, u=4, c=64), operands, "s c", COLUMNS, group_size=16, **options)


FAMILIES = (
    family("normal", lambda rng, shape: rng.standard_normal(shape)),
    family("large", large, mode="nf4"),
    family("one_hot_rows", one_hot),
    family("long_uniform_rows", uniform, k=512),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

# With 128 features and 128 columns weights have the same shape in both layouts.
PLAIN = plain(
    "quantized_matmul",
    dict(m=40, k=128, p=16, u=2, b=3),
    dict(x="m k", w=Operand("k p", codes), scales=Operand("k u", positive)),
    mode="nf4",
)


def affine(bits, group_size=64):
    zeros = dict(zeros=Operand("k u", middle))
    sizes = dict(p=128 * bits // 32, u=128 // group_size)
    return Feature("format", sizes, zeros, dict(mode="affine", bits=bits, group_size=group_size))


def micro(mode, p, u, values):
    operands = dict(w=Operand("k p", small_codes), scales=Operand("k u", values))
    return Feature("format", dict(p=p, u=u), operands, dict(mode=mode))


FEATURES = DTYPES | {
    "affine 2": affine(2),
    "affine 3": affine(3),
    "affine 4": affine(4),
    "affine 8": affine(8, 32),
    "mxfp4": micro("mxfp4", 16, 4, exponents),
    "mxfp8": micro("mxfp8", 32, 4, exponents),
    "nvfp4": micro("nvfp4", 16, 8, e4m3),
    "nvfp8": micro("nvfp8", 32, 8, e4m3),
    "large groups": Feature("format", dict(u=1), options=dict(group_size=128)),
    "transposed": Feature("layout", options=dict(transpose=True)),
    "batch": operand("rows", x="b m k"),
    "one row": sized("rows", m=1),
}
