"""Steps of ragged_page_attention_v3 with prefill, decode, and a sequence without tokens. Two devices split the heads.

Tables with different seeds fit together. The letter z is the slots of a page: its size is fixed.
"""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized


def context_lens(rng, shape):
    """From 4 tokens, more than any of them has in the step, to all that the pages of a sequence hold."""
    return rng.integers(4, 17, shape).astype(np.int32)


def block_tables(rng, shape):
    """No page belongs to two sequences."""
    return rng.permutation(shape[0] * shape[1]).reshape(shape).astype(np.int32)


def query_start_loc(rng, shape):
    """A chunk of a prefill, one token of decode, none, and up to 3 more; the last tokens have no sequence."""
    lengths = [rng.integers(2, 4), 1, 0, *rng.integers(1, 4, shape[0] - 4)]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def all_but_one(rng, shape):
    return np.array([3], np.int32)


SIZES = dict(t=10, h=4, g=2, c=4, d=8, p=16, z=4, n=4, m=5, j=4, one=1)
OPERANDS = dict(
    q="t h d",
    k="t g d",
    v="t g d",
    kv_pages="p z c d",
    context_lens=Operand("n", context_lens),
    block_tables=Operand("n j", block_tables),
    query_start_loc=Operand("m", query_start_loc),
    num_seqs=Operand("one", all_but_one),
)


def case(name, sizes=(), operands=(), local=True, **options):
    results = ("t h d", "t h", "p z c d") if options.get("return_lse") else ("t h d", "p z c d")
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("ragged_page_attention_v3", name, sizes, operands, results, options, local, split_with={"c": "g"})


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5),
    case("one_kv_head", dict(g=1, c=2), local=False),  # devices that split its query heads all write the whole pool
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


LENGTHS = (30, 1, 0, 29)


def family(name, values=lambda rng, shape: rng.standard_normal(shape), sizes=(), context=60):
    """64 tokens of 4 heads, one of them in decode, with contexts of that length."""
    arrays = {n: Operand(axes, values) for n, axes in dict(q="t h d", k="t g d", v="t g d", kv_pages="p z c d").items()}
    tables = dict(
        context_lens=Operand("n", lambda rng, shape: np.full(shape, context, np.int32)),
        query_start_loc=Operand("m", lambda rng, shape: np.cumsum([0, *LENGTHS]).astype(np.int32)),
    )
    return case(name, dict(t=64, d=64, z=16) | dict(sizes), arrays | tables, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), dict(z=128, p=64, j=16), 2000),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain(
    "ragged_page_attention_v3", dict(t=64, h=4, g=2, c=4, d=128, p=16, z=16, n=4, m=5, j=4, one=1, x=2), OPERANDS
)

FEATURES = DTYPES | {
    "all sequences": operand("sequences", num_seqs=Operand("", lambda rng, shape: np.int32(4))),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "scale": option(softmax_scale=0.3),
    "lse": option(return_lse=True),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1, g=1, c=2),
}
