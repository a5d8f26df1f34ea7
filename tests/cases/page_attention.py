"""Steps of page_attention, with sequences of one token, of none, and of all that their pages hold.

Tables with different seeds fit together, as sequences share pages. The letter z is the slots of a page: its size is
fixed. Pages that do not exist are clamped.
"""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, operand, option, plain, sized


def up_to(most: int):
    """Contexts of 0, 1, `most` and other lengths."""

    def values(rng, shape):
        lengths = rng.integers(0, most + 1, shape)
        lengths[:3] = rng.permutation([0, 1, most])[: len(lengths)]
        return lengths.astype(np.int32)

    return values


def pages_of(pages: int):
    """Pages of the pool, and some outside it."""

    def values(rng, shape):
        strange = rng.choice([-1, pages, 2**31 - 1], shape)
        return np.where(rng.random(shape) < 0.1, strange, rng.integers(0, pages, shape)).astype(np.int32)

    return values


def small_integers(rng, shape):
    return rng.integers(-8, 8, shape, dtype=np.int8)


def positive(rng, shape):
    return rng.uniform(0.1, 0.5, shape)


def no_work(rng, shape):
    """No work items: in XLA, which computes these cases, no program follows a plan."""
    return np.zeros(shape, np.int32)


SIZES = dict(b=4, h=4, g=2, d=8, e=12, p=10, z=4, j=4)
TABLES = dict(context_lens=Operand("b", up_to(16)), block_tables=Operand("b j", pages_of(10)))
OPERANDS = dict(q="b h d", k_pages="p z g d", v_pages="p z g e") | TABLES
INT8 = dict(k_pages=Operand("p z g d", small_integers), v_pages=Operand("p z g e", small_integers))


def case(name, sizes=(), operands=(), **options):
    results = ("b h e", "b h") if options.get("return_lse") else ("b h e",)
    return Case("page_attention", name, {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}, results, options)


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5, num_splits=3),
    case("one_kv_head", dict(g=1), dict(k_scale=Operand("", positive), v_scale=Operand("g", positive))),
    case(
        "int8",
        operands=INT8 | dict(k_scale=Operand("p z g", positive), v_scale=Operand("p z g", positive)),
        return_lse=True,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values=lambda rng, shape: rng.standard_normal(shape), sizes=()):
    """Eight sequences of random lengths, with rows that share keys."""
    sizes = dict(b=8, d=64, e=64, p=24, z=16) | dict(sizes)
    axes = dict(q="b h d", k_pages="p z g d", v_pages="p z g e")
    tables = dict(
        context_lens=Operand("b", up_to(sizes["z"] * sizes.get("j", 4))),
        block_tables=Operand("b j", pages_of(sizes["p"])),
    )
    return case(name, sizes, {n: Operand(of, values) for n, of in axes.items()} | tables, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), dict(z=128, p=64, j=16)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("page_attention", dict(b=4, h=4, g=2, d=128, e=128, p=10, z=16, j=4, x=2, l=4, i=2), OPERANDS)

FEATURES = DTYPES | {
    "int8": operand("pages", **INT8),
    "scale": operand("k_scale", k_scale=Operand("", positive)),
    "scale of heads": operand("k_scale", k_scale=Operand("g", positive)),
    "scale of slots": operand("k_scale", k_scale=Operand("p z g", positive), v_scale=Operand("p z g", positive)),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "plan": Feature("sequences", operands=dict(plan=Operand("l i 8", no_work))),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "static scale": option(softmax_scale=0.3),
    "splits": option(num_splits=2),
    "lse": option(return_lse=True),
    "batch invariant": option(batch_invariant=True),
    "one sequence": sized("sequences", b=1),
    "one head": sized("heads", h=1, g=1),
    "other values": sized("features", e=64),
}
