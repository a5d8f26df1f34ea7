"""Steps of native_sparse_decode_attention, with sequences of one key, of none, and of all."""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, operand, option, plain, sized
from .native_sparse_attention import lists
from .ragged_decode_attention import ends

SIZES = dict(b=4, h=4, g=2, t=17, x=8, d=8, e=16, n=3)
CACHE = dict(q="b h d", k="b t g d", v="b t g e", sequence_end=Operand("b", ends(17)))
MEANS = dict(k_cmp="b x g d", v_cmp="b x g e")
GATES = dict.fromkeys(("g_cmp", "g_slc", "g_swa"), "b h")


def case(name, sizes=(), operands=(), **options):
    results = ("b h e", "b g n") if options.get("return_block_indices") else ("b h e",)
    return Case(
        "native_sparse_decode_attention",
        name,
        {**SIZES, **dict(sizes)},
        {**CACHE, **dict(operands)},
        results,
        options,
    )


CASES = (
    case("chosen", dict(x=4, n=2), dict(k_cmp="b x g d"), block_size=4, block_counts=2),
    case("branches", operands=MEANS | GATES, block_size=2, block_counts=3, window=5, return_block_indices=True),
    case("lists", operands=dict(block_indices=Operand("b g n", lists(6))), block_size=3, softmax_scale=0.5),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values=lambda rng, shape: rng.standard_normal(shape), length=60, size=8):
    """Eight sequences of random lengths, with lists of random blocks."""
    arrays = {n: Operand(of, values) for n, of in dict(q="b h d", k="b t g d", v="b t g e").items()}
    arrays["sequence_end"] = Operand("b", ends(length))
    arrays["block_indices"] = Operand("b g n", lists(length // size))
    return case(name, dict(b=8, t=length, d=64, e=64, n=4), arrays, block_size=size)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), 2000, 256),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

COMPRESSED = dict(v_cmp="b x g e", g_cmp="b h")
SIZES_OF_PAIRS = dict(b=4, h=4, g=2, t=192, x=12, d=64, e=64, n=4)
ARRAYS = CACHE | dict(k_cmp="b x g d", sequence_end=Operand("b", ends(192)))
PLAIN = plain("native_sparse_decode_attention", SIZES_OF_PAIRS, ARRAYS, block_size=16, block_counts=4)

FEATURES = DTYPES | {
    "compressed": operand(**COMPRESSED),
    "lists": operand(block_indices=Operand("b g n", lists(12)), **COMPRESSED),
    "gate": operand(g_slc="b h"),
    "window": option("window", window=20),
    "gated window": Feature("window", operands=dict(g_swa="b h"), options=dict(window=20)),
    "scale": option(softmax_scale=0.3),
    "indices": option(return_block_indices=True),
    "a cache that is not whole blocks": sized("keys", t=200),
    "one sequence": sized("sequences", b=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=128),
}
