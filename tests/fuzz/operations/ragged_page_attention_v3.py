"""Calls of ragged_page_attention_v3."""

import numpy as np

from ..formulas.ragged_page_attention_v3 import formula, slots
from ._draws import along, chance, cuts, heads, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ("h", "g")
DTYPES = {}


def programs(draw, sizes):
    size = heads(draw) | {"t": pick(draw, 1, 2, 5, 17, 40, 70), "d": pick(draw, *sizes.attention_features)}
    size |= {"n": (n := pick(draw, 1, 2, 4)), "m": n + 1, "j": pick(draw, 1, 3, 6), "z": pick(draw, 1, 8, 16), "one": 1}
    size |= {"p": size["n"] * size["j"] + pick(draw, 0, 0, 3), "c": 2 * size["g"]}
    operands = dict(q="t h d", k="t g d", v="t g d", kv_pages="p z c d", context_lens="n", block_tables="n j")
    operands |= dict(query_start_loc="m", num_seqs="one")
    options = {}
    if chance(draw, 30):
        operands["sinks"], size["x"] = pick(draw, "h", "h x"), pick(draw, 1, 2)
    if chance(draw, 40):
        options["window"] = pick(draw, 1, 3, 20, (4, None), (2, 2))
    if chance(draw, 30):
        options["softcap"] = pick(draw, 0.5, 5.0)
    if chance(draw, 30):
        options["softmax_scale"] = pick(draw, 0.25, 1.0, -0.5)
    if chance(draw, 60):
        options["return_lse"] = True
    return operands, size, options, {}


def values(call, name, rng, shape):
    """Sequences longer than their context among them: their first tokens have no place."""
    tokens, capacity = call.sizes["t"], call.sizes["j"] * call.sizes["z"]
    if name == "context_lens":
        return rng.integers(0, capacity + 1, shape).astype(np.int32)
    if name == "block_tables":
        return rng.permutation(call.sizes["p"])[: shape[0] * shape[1]].reshape(shape).astype(np.int32)
    if name == "query_start_loc":
        return cuts(rng, call.sizes["n"], tokens)
    return rng.integers(0, call.sizes["n"] + 1, shape).astype(np.int32) if name == "num_seqs" else None


def facts(call, x):
    window = call.options.get("window")
    keys = window[0] + 1 if isinstance(window, tuple) else window
    return dict(zip(("valid", "writes", "sees"), slots(x, call.sizes["z"], call.sizes["p"], keys), strict=True))


def hidden(call, x):
    """Tokens of no sequence. Slots that are not seen are results all the same."""
    unread = ~facts(call, x)["valid"]
    return {name: along(unread, 0, call.shape(name)) for name in "qkv"}


def results(call):
    lse = [("t h", np.promote_types(call.type("q"), np.float32))] if call.options.get("return_lse") else []
    return [("t h d", call.type("q")), *lse, ("p z c d", call.type("q"))]
