"""Calls of native_sparse_blocks with three blocks at most, the own, the first and one between: no score decides."""

import numpy as np

from ..formulas.native_sparse_blocks import formula
from ._draws import chance, cuts, heads, pick
from .native_sparse_attention import positions

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b", "h", "g")
DTYPES = {}
FORWARD_ONLY = True


def programs(draw, sizes):
    S = pick(draw, *sizes.lengths)
    K = S if chance(draw, 60) else pick(draw, *sizes.lengths)
    size = {"b": pick(draw, 1, 2, 3), "s": S, "t": K, "d": pick(draw, *sizes.attention_features), **heads(draw)}
    options, operands, dtypes = {"block_counts": pick(draw, 1, 2, 3, 5)}, dict(q="b s h d", k="b t g d"), {}
    if chance(draw, 30):
        del size["b"]
        size |= dict(t=S, m=pick(draw, 2, 3, 5))
        operands = dict(q="1 s h d", k="1 s g d", cu_seqlens="m")
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32")
    options["block_size"] = max(1, -(-size["t"] // 3)) + pick(draw, 0, 1, 5)
    if chance(draw, 30):
        options["softmax_scale"] = pick(draw, 0.25, 1.0, -0.5, 0.0, 1)
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(block_q=pick(draw, 1, 5, 16))
    return operands, size | {"n": options["block_counts"]}, options, dtypes


def values(call, name, rng, shape):
    return cuts(rng, call.sizes["m"] - 1, call.sizes["s"]) if name == "cu_seqlens" else None


def facts(call, x):
    """The own block, the first, and the one between."""
    n, i, *_ = positions(call, x)
    own = np.where((n < 0) | (i < 0), -1, i // call.options["block_size"])
    lists = np.stack([own, np.where(own > 0, 0, -1), np.where(own > 1, 1, -1), *[np.full_like(own, -1)] * 2], axis=1)
    shape = (*call.shape("q")[:2], call.sizes["g"], call.sizes["n"])
    return {"lists": np.broadcast_to(lists[None, :, None, : call.sizes["n"]], shape)}


def hidden(call, x):
    """Queries that see nothing."""
    n, i, *_ = positions(call, x)
    return {"q": np.broadcast_to(((n < 0) | (i < 0))[None, :, None, None], call.shape("q"))}


def results(call):
    return [(f"{call.operands['q'].split()[0]} s g n", np.dtype("int32"))]
