"""Calls of native_sparse_blocks, whose results are block indices."""

from . import flash_attention as flash
from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, Feature, S, option, plain, sized

SIZES = dict(b=4, s=8, t=12, h=4, g=2, d=8, n=3)
QK = dict(q="b s h d", k="b t g d")


def case(name, sizes=(), operands=(), batch="b", **options):
    sizes, operands = {**SIZES, **dict(sizes)}, {**QK, **dict(operands)}
    return Case("native_sparse_blocks", name, sizes, operands, (f"{batch} s g n",), options)


CASES = (
    case("dense", block_size=2, block_counts=3),
    case(
        "packed",
        dict(s=40, m=6, n=4),
        dict(q="1 s h d", k="1 s g d", cu_seqlens=Operand("m", flash.lengths(40))),
        "1",
        block_size=2,
        block_counts=4,
        softmax_scale=0.5,
    ),
)
FAMILIES = (case("normal", dict(s=40, t=40, n=4), block_size=4, block_counts=4),)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("native_sparse_blocks", TOKENS, QK, block_counts=3)

FEATURES = DTYPES | {
    "packed": Feature("queries", dict(b=1, t=S), dict(cu_seqlens=Operand("m", flash.lengths(S)))),
    "small blocks": option(block_size=16),
    "scale": option(softmax_scale=0.3),
    "one query": sized("queries", s=1),
    "one key": sized("queries", t=1),
}
