"""Steps of ragged_page_attention with prefill, decode, and a sequence without tokens. Two devices split the heads.

Tables with different seeds fit together, as sequences share pages. The letter z is the slots of a page: its size is
fixed.
"""

import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, operand, option, plain, sized
from .page_attention import no_work, pages_of, positive, small_integers
from .ragged_page_attention_v3 import all_but_one, context_lens, query_start_loc


def tree(rng, shape):
    """Random drafts are visible, the own one or not."""
    return rng.random(shape) < 0.6


SIZES = dict(t=10, h=4, g=2, c=4, d=8, p=10, z=4, n=4, m=5, j=4, w=3, one=1)
OPERANDS = dict(
    q="t h d",
    kv_pages="p z c d",
    context_lens=Operand("n", context_lens),
    block_tables=Operand("n j", pages_of(10)),
    query_start_loc=Operand("m", query_start_loc),
    num_seqs=Operand("one", all_but_one),
)
SCALES = dict(k_scale=Operand("p z g", positive), v_scale=Operand("p z g", positive))


def case(name, sizes=(), operands=(), **options):
    results = ("t h d", "t h") if options.get("return_lse") else ("t h d",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**OPERANDS, **dict(operands)}
    return Case("ragged_page_attention", name, sizes, operands, results, options, split_with={"c": "g"})


CASES = (
    case("mixed", return_lse=True),
    case("window_softcap_sinks", dict(x=2), dict(sinks="h x"), window=5, softcap=2.0, softmax_scale=0.5, num_splits=3),
    case("one_kv_head", dict(g=1, c=2), dict(k_scale=Operand("", positive), v_scale=Operand("g", positive))),
    case("int8", operands=dict(kv_pages=Operand("p z c d", small_integers)) | SCALES, return_lse=True),
    case(
        "drafts",
        dict(l=7, i=2),
        dict(draft_mask=Operand("t w", tree), plan=Operand("l i 8", no_work)),
        window=6,
        return_lse=True,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


LENGTHS = (30, 1, 0, 29)


def family(name, values=lambda rng, shape: rng.standard_normal(shape), sizes=(), context=60):
    """64 tokens of 4 heads, one of them in decode, with contexts of that length."""
    sizes = dict(t=64, d=64, z=16, p=24) | dict(sizes)
    arrays = {n: Operand(axes, values) for n, axes in dict(q="t h d", kv_pages="p z c d").items()}
    tables = dict(
        context_lens=Operand("n", lambda rng, shape: np.full(shape, context, np.int32)),
        block_tables=Operand("n j", pages_of(sizes["p"])),
        query_start_loc=Operand("m", lambda rng, shape: np.cumsum([0, *LENGTHS]).astype(np.int32)),
    )
    return case(name, sizes, arrays | tables, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large", lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot", lambda rng, shape: 8 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]),
    family("long_uniform", lambda rng, shape: 1 + 1e-3 * rng.standard_normal(shape), dict(z=128, p=64, j=16), 2000),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain(
    "ragged_page_attention",
    dict(t=64, h=4, g=2, c=4, d=128, p=10, z=16, n=4, m=5, j=4, one=1, x=2, w=3, l=5, i=2),
    OPERANDS,
)

FEATURES = DTYPES | {
    "all sequences": operand("sequences", num_seqs=Operand("", lambda rng, shape: np.int32(4))),
    "int8": operand("pages", kv_pages=Operand("p z c d", small_integers)),
    "scale": operand("scale", k_scale=Operand("", positive)),
    "scale of heads": operand("scale", k_scale=Operand("g", positive)),
    "scale of slots": operand("scale", **SCALES),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h x"),
    "drafts": operand(draft_mask=Operand("t w", tree)),
    "plan": operand(plan=Operand("l i 8", no_work)),
    "window": option("window", window=20),
    "window to the left": option("window", window=(20, None)),
    "softcap": option(softcap=20.0),
    "static scale": option(softmax_scale=0.3),
    "splits": option(num_splits=2),
    "lse": option(return_lse=True),
    "batch invariant": option(batch_invariant=True),
    "one token": sized("tokens", t=1),
    "one head": sized("heads", h=1, g=1, c=2),
}
