"""Calls of native_sparse_attention. With b = h = 4 and g = 2, eight devices can split the batch by 4, the heads by 2.

The generated tests differentiate q, k and v; those of tests/kernels/test_xla_native_sparse_attention.py the gates too.
"""

import numpy as np

from . import flash_attention as flash
from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, Feature, S, operand, option, plain, sized


def lists(of: int):
    """Blocks from −1 to `of`: some are after the query, negative, out of range or twice in a list."""
    return lambda rng, shape: rng.integers(-1, of + 1, shape, dtype=np.int32)


def near(size: int):
    """The own block of each query, those before it, and then −1."""

    def values(rng, shape):
        own = np.arange(shape[1])[None, :, None, None] // size
        return np.broadcast_to(np.maximum(own - np.arange(shape[3]), -1), shape).astype(np.int32)

    return values


SIZES = dict(b=4, s=8, t=12, h=4, g=2, d=8, e=8, n=2)
TINY = dict(b=1, s=2, t=3, h=2, g=1, d=2, e=2, n=2)
QKV = dict(q="b s h d", k="b t g d", v="b t g e")
PACKED = dict(q="1 s h d", k="1 s g d", v="1 s g e")
GATES = ("g_cmp", "g_slc", "g_swa")


def case(name, sizes=(), operands=(), of=QKV, tiny=None, **options):
    batch = "1" if of is PACKED else "b"
    results = (f"{batch} s h e", f"{batch} s g n") if options.get("return_block_indices") else (f"{batch} s h e",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**of, **dict(operands)}
    return Case("native_sparse_attention", name, sizes, operands, results, options, tiny=tiny)


CASES = (
    case("lists", operands=dict(block_indices=Operand("b s g n", lists(4))), tiny=TINY, block_size=3),
    case(
        "packed_lists",
        dict(s=24, n=3, m=6),
        dict(block_indices=Operand("1 s g n", lists(4)), cu_seqlens=Operand("m", flash.lengths(24))),
        PACKED,
        block_size=3,
    ),
    case("chosen", dict(s=12, n=3), dict(g_slc="b s h"), block_size=2, block_counts=3, softmax_scale=0.3),
    case("branches", operands=dict.fromkeys(GATES, "b s h"), block_size=2, block_counts=2, window=3),
    case(
        "packed_branches",
        dict(s=24, m=6, n=3),
        dict.fromkeys(GATES, "1 s h") | dict(cu_seqlens=Operand("m", flash.lengths(24))),
        PACKED,
        block_size=2,
        block_counts=3,
        window=4,
    ),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, sizes=(), size=8, **values):
    sizes = {**dict(b=2, s=40, t=40, h=4, g=2, d=16, e=16, n=3), **dict(sizes)}
    operands = {n: Operand(QKV[n], make) for n, make in values.items()}
    operands["block_indices"] = Operand("b s g n", near(size))
    return case(name, sizes, operands, block_size=size)


FAMILIES = (
    family("normal"),
    family("large_logits", q=lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot_peaks", q=flash.peaks, k=flash.peaks),
    family("long_uniform_rows", dict(s=512, t=512, n=4), 128, q=lambda rng, shape: 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("native_sparse_attention", TOKENS | dict(h=32, n=3), QKV, block_counts=3)

FEATURES = DTYPES | {
    "lists": operand(block_indices=Operand("b s g n", lists(4))),
    "compressed": operand(g_cmp="b s h"),
    "gate": operand(g_slc="b s h"),
    "window": option("window", window=64),
    "gated window": Feature("window", operands=dict(g_swa="b s h"), options=dict(window=(32, 3))),
    "packed": Feature("queries", dict(b=1, t=S), dict(cu_seqlens=Operand("m", flash.lengths(S)))),
    "small blocks": option("blocks", block_size=16),
    "odd blocks": option("blocks", block_size=40),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", flash.scalar)),
    "indices": option(return_block_indices=True),
    "one query": sized("queries", s=1),
    "one key": sized("queries", t=1),
    "few heads": sized("heads", h=4),
    "one key head": sized("heads", g=1),
    "wide values": sized("features", e=128),
    "uneven features": sized("features", d=40, e=24),
}
