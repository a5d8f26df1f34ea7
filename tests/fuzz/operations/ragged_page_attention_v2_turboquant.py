"""Calls of ragged_page_attention_v2_turboquant. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.ragged_page_attention_v2_turboquant import formula
from . import _turboquant, ragged_page_attention
from ._cache import draw_options, hidden_pages, hidden_slots
from ._draws import along, chance, heads, logits_rounded, pick
from ._turboquant import DTYPES, MATRICES, NORMS, POOLS, draw_matrices, facts_of_bytes, largest

__all__ = ["DTYPES", "formula"]

SHARE = 1
SPLIT = ()
FORWARD_ONLY = True


def programs(draw, sizes):
    n, size = pick(draw, 1, 2, 3, 5), {"t": pick(draw, 1, 3, 8, 12, 20), **heads(draw)}
    size |= {"z": pick(draw, 8, 16, 4, 1), "n": n, "m": n + 1, "j": pick(draw, 1, 2, 5), "p": pick(draw, 1, 4, 12)}
    operands = {"q": "t h d"} | POOLS | dict(context_lens="n", block_tables="n j", query_start_loc="m")
    operands |= {"num_seqs": pick(draw, "1", "")} | MATRICES
    options, dtypes = {}, {}
    draw_matrices(draw, size, dtypes)
    draw_options(draw, operands, options, dtypes)
    if sizes.configs and chance(draw, 20):
        options["config"] = dict(queries_per_block=pick(draw, 1, 3, 8), pages_per_block=pick(draw, 1, 2, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    found = _turboquant.values(call, name, rng, shape)
    return ragged_page_attention.values(call, name, rng, shape) if found is None else found


def facts(call, x):
    return ragged_page_attention.facts(call, x) | facts_of_bytes(call, x)


def hidden(call, x):
    """Tokens of no sequence, and norms of slots that nobody sees."""
    seen = ragged_page_attention.facts(call, x)
    slots = hidden_slots(call, seen["pages"], seen["visible"])
    return {"q": along(~seen["inside"], 0, call.shape("q"))} | hidden_pages(call, x, slots, NORMS)


def sensitivity(call, x):
    """The relative error of weights."""
    return logits_rounded(call, x, largest(call, x))


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    return [("t h d", call.type("q")), *[("t h", statistics)] * bool(call.options.get("return_lse"))]
