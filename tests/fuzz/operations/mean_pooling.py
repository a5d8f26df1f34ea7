"""Calls of mean_pooling."""

import numpy as np

from ..formulas.mean_pooling import formula
from ._draws import along, chance, cuts, pick, tokens_past

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b", "d")
DTYPES = {}


def programs(draw, sizes):
    size = {"s": pick(draw, *sizes.lengths), "d": pick(draw, *sizes.features)}
    operands, options, dtypes = {"x": "b s d"}, {}, {}
    if chance(draw, 60):
        operands = {"x": "s d", "cu_seqlens": "m"}
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32", "int16")
        size["m"] = (n := pick(draw, 1, 2, 4, 7)) + 1
        size["n"] = n
    else:
        size["b"] = pick(draw, 1, 2, 3)
    if chance(draw, 30):
        options["chunk_size"] = pick(draw, 1, 4, 64, 1000)
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    return cuts(rng, call.sizes["n"], call.sizes["s"]) if name == "cu_seqlens" else None


def facts(call, x):
    if "cu_seqlens" not in x:
        return {}
    ends, token = x["cu_seqlens"].astype(np.int64), np.arange(call.sizes["s"])
    inside = (ends[:-1, None] <= token) & (token < ends[1:, None])
    return {"share": inside / np.maximum(np.diff(ends), 1)[:, None]}


def hidden(call, x):
    """Tokens of no sequence."""
    if "cu_seqlens" not in x:
        return {}
    return {"x": along(tokens_past(x["cu_seqlens"], call.sizes["s"]), 0, call.shape("x"))}


def results(call):
    return [("n d" if "cu_seqlens" in call.operands else "b d", call.type("x"))]
