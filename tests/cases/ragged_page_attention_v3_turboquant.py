"""Steps of ragged_page_attention_v3_turboquant with prefill, decode, and a sequence without tokens.

Two devices split the heads. Tables with different seeds fit together.
"""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized
from .ragged_page_attention_v2_turboquant import CODEBOOKS, LENGTHS, MATRICES, POOLS, SIZES, TABLES, WIDE
from .ragged_page_attention_v3 import block_tables

SIZES = SIZES | dict(p=16)
OPERANDS = dict(q="t h d", k="t g d", v="t g d") | POOLS
OPERANDS |= TABLES | dict(block_tables=Operand("n j", block_tables)) | MATRICES


def case(name, sizes=(), operands=(), local=True, **options):
    results = ("t h d", "t h") if options.get("return_lse") else ("t h d",)
    results += tuple(x.axes for x in POOLS.values())
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("ragged_page_attention_v3_turboquant", name, sizes, operands, results, options, local)


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5),
    case("one_kv_head", dict(g=1, k=8, v=16), local=False),  # devices that split its query heads all write all pools
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, values=lambda rng, shape: rng.standard_normal(shape), sizes=(), context=60):
    """64 tokens of 4 heads, one of them in decode, with contexts of that length."""
    arrays = {n: Operand(axes, values) for n, axes in dict(q="t h d", k="t g d", v="t g d").items()}
    tables = dict(
        context_lens=Operand("n", lambda rng, shape: np.full(shape, context, np.int32)),
        query_start_loc=Operand("m", lambda rng, shape: np.cumsum([0, *LENGTHS]).astype(np.int32)),
    )
    return case(name, WIDE | dict(p=16) | dict(sizes), arrays | tables | CODEBOOKS, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), dict(z=128, p=64, j=16), 2000),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain(
    "ragged_page_attention_v3_turboquant",
    dict(t=64, h=4, g=2, d=128, f=128, p=16, z=16, n=4, m=5, j=4, one=1, x=2, i=64, e=128, w=16, k=8, v=16),
    OPERANDS,
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
    "two bits": sized("bits", k=2, v=4),
    "few signs": sized("signs", e=32, w=4),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1, g=1),
}
