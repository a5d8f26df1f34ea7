"""Calls of page_attention, which has no derivative. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.page_attention import formula
from ._cache import draw_options, draw_quantised, hidden_pages, hidden_slots, left_of, page_values, pages_of
from ._draws import along, chance, heads, logits_rounded, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b",)
DTYPES = {"sinks": "float32", "k_scale": "float32", "v_scale": "float32"}
FORWARD_ONLY = True
POOLS = ("k_pages", "v_pages")

values = page_values


def programs(draw, sizes):
    size = {"b": pick(draw, 1, 2, 3, 5, 20), "d": pick(draw, 8, 16, 32), "e": pick(draw, 8, 16, 20), **heads(draw)}
    size |= {"z": pick(draw, 8, 16, 4, 1), "j": pick(draw, 1, 2, 5), "p": pick(draw, 1, 4, 12)}
    operands = dict(q="b h d", k_pages="p z g d", v_pages="p z g e", context_lens="b", block_tables="b j")
    options, dtypes = {}, {}
    draw_options(draw, operands, options, dtypes, most_splits=size["j"])
    draw_quantised(draw, operands, options, dtypes, POOLS)
    if sizes.configs and chance(draw, 20):
        options["config"] = dict(queries_per_block=pick(draw, 1, 3, 8), keys_per_block=pick(draw, 1, 16, 64))
    return operands, size, options, dtypes


def facts(call, x):
    """Of each sequence its pages, whether it is there, and which of the keys in them it sees."""
    context, left = x["context_lens"].astype(np.int64)[:, None], left_of(call)
    j = np.arange(call.sizes["j"] * call.sizes["z"])[None]
    visible = j < context
    if left is not None:
        visible &= j >= context - 1 - left
    return {"pages": pages_of(call, x), "inside": context[:, 0] > 0, "visible": visible}


def hidden(call, x):
    """Queries of empty sequences, and slots that nobody sees."""
    seen = facts(call, x)
    slots = hidden_slots(call, seen["pages"], seen["visible"])
    return {"q": along(~seen["inside"], 0, call.shape("q"))} | hidden_pages(call, x, slots, POOLS)


def sensitivity(call, x):
    """The relative error of weights."""
    scale = np.max(x.get("k_scale", np.ones(1)), initial=0)
    return logits_rounded(call, x, [x["k_pages"].astype(np.float64) * scale])


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    return [("b h e", call.type("q")), *[("b h", statistics)] * bool(call.options.get("return_lse"))]
