"""Calls of blocksparse_attention: those of flash_attention with a block mask."""

from dataclasses import replace

import numpy as np

from . import flash_attention as flash
from ._case import Operand
from ._feature import S, T, operand, option, sized


def blocks(of: float):
    """True with this probability, and beside the diagonal; all False in the last row, if there are several."""

    def values(rng, shape):
        rows, columns = shape[-2:]
        x = (rng.random(shape) < of) | (np.arange(rows)[:, None] * columns // max(1, rows) == np.arange(columns))
        if rows > 1:
            x[..., -1, :] = False
        return x

    return values


SIZE = (3, 4)
HALF = blocks(0.5)


def number(length, block):
    return -(-length // block)


def sparse(case, axes="x y", size=SIZE, **changes):
    """The case of flash_attention with a block mask of its own blocks."""
    sizes = dict(x=number(case.sizes["s"], size[0]), y=number(case.sizes["t"], size[1]))
    tiny = case.tiny and case.tiny | dict(x=number(case.tiny["s"], size[0]), y=number(case.tiny["t"], size[1]))
    return replace(
        case,
        operation="blocksparse_attention",
        sizes=case.sizes | sizes,
        operands=case.operands | dict(block_mask=Operand(axes, HALF)),
        options=dict(case.options, block_size=size),
        tiny=tiny,
        **changes,
    )


OF_FLASH = {case.name: case for case in flash.CASES}
CASES = (
    sparse(OF_FLASH["causal"], size=(2, 3)),
    sparse(OF_FLASH["window_softcap_sinks"], "h x y"),
    sparse(OF_FLASH["bias_mask"], "b h x y"),
    sparse(OF_FLASH["segments"], "b 1 x y"),
    sparse(OF_FLASH["packed"], "h x y"),
    sparse(OF_FLASH["dropout_traced_scale"], "1 h x y"),
    sparse(OF_FLASH["cross_one_kv_head"], "h x y", (5, 2)),
)
# Of several tiles, and as large as this: on a CPU, XLA sums the 16 products of a logit sequentially if the matrix has
# 20 × 20 entries or more, and in parts if it is smaller or batched, which has a 1.45 times smaller error. A formula of
# some heads of 24 × 40 is of the second kind, and so more accurate than a tile of one of them.
FAMILIES = tuple(sparse(case.resized(dict(s=144, t=192)), "b h x y", (16, 16)) for case in flash.FAMILIES)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

BLOCKS = (64, 32)
PLAIN = sparse(flash.PLAIN, size=BLOCKS)
FEATURES = flash.FEATURES | {
    "one query": sized("queries", s=1, x=1),
    "one key": sized("keys", t=1, y=1),
    "no key": sized("keys", t=0, y=0),
    "blocks of heads": operand("blocks", block_mask=Operand("h x y", HALF)),
    "blocks of the batch": operand("blocks", block_mask=Operand("1 1 x y", HALF)),
    "no block": operand("blocks", block_mask=Operand("x y", lambda rng, shape: np.zeros(shape, bool))),
    "small blocks": replace(option("blocks", block_size=(7, 8)), sizes=dict(s=S, t=T, x=number(S, 7), y=number(T, 8))),
}
