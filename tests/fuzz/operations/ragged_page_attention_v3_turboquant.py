"""Calls of ragged_page_attention_v3_turboquant. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.ragged_page_attention_v3_turboquant import formula
from . import _turboquant, ragged_page_attention_v3
from ._cache import draw_options
from ._draws import heads, logits_rounded, pick
from ._turboquant import DTYPES, MATRICES, NORMS, POOLS, draw_matrices, facts_of_bytes, largest

__all__ = ["DTYPES", "formula"]

SHARE = 1
SPLIT = ()
FORWARD_ONLY = True


def programs(draw, sizes):
    n, size = pick(draw, 1, 2, 3, 5), {"t": pick(draw, 1, 3, 8, 12, 20), **heads(draw)}
    size |= {"z": pick(draw, 8, 16, 4, 1), "n": n, "m": n + 1, "j": pick(draw, 1, 2, 5)}
    size["p"] = n * size["j"] + pick(draw, 0, 1, 3)
    operands = dict(q="t h d", k="t g d", v="t g d") | POOLS
    operands |= dict(context_lens="n", block_tables="n j", query_start_loc="m", num_seqs=pick(draw, "1", "")) | MATRICES
    options, dtypes = {}, {}
    draw_matrices(draw, size, dtypes)
    draw_options(draw, operands, options, dtypes)
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    found = _turboquant.values(call, name, rng, shape)
    return ragged_page_attention_v3.values(call, name, rng, shape) if found is None else found


def facts(call, x):
    """Those of the third version, the bytes as they are and what they stand for, and the dtypes of norms."""
    of_pool = {name: x[name].astype(np.float64) for name in POOLS if name not in NORMS}
    dtypes = {f"dtype of {name}": np.zeros((), call.type(name)) for name in NORMS}
    unread = hidden(call, x)["value_norms_pages"][:, :, 0]
    return ragged_page_attention_v3.facts_given(call, x, unread) | facts_of_bytes(call, x) | of_pool | dtypes


def hidden(call, x):
    """Tokens of no sequence, and norms of slots that belong to no context, or that the step writes before it reads."""
    tokens, slots = ragged_page_attention_v3.unread(call, x)
    wide = lambda name: slots.reshape(*slots.shape, *(1,) * (len(call.shape(name)) - 2))
    return tokens | {name: np.broadcast_to(wide(name), call.shape(name)) for name in NORMS}


def sensitivity(call, x):
    """The relative error of weights: of new keys as long as 3 times their length."""
    return logits_rounded(call, x, [3 * x["k"].astype(np.float64), *largest(call, x)])


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    lse = [("t h", statistics)] * bool(call.options.get("return_lse"))
    pools = [(axes, call.type(name) if name in NORMS else np.dtype(np.uint8)) for name, axes in POOLS.items()]
    return [("t h d", call.type("q")), *lse, *pools]
