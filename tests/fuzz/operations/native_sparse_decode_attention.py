"""Calls of native_sparse_decode_attention with given blocks: a choice of them is not continuous in q and k_cmp."""

import numpy as np

from ..formulas.native_sparse_decode_attention import formula
from ._draws import chance, heads, logits_rounded, pick
from .native_sparse_attention import flash_window

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b", "h", "g")
GATES = ("g_cmp", "g_slc", "g_swa")
DTYPES = dict.fromkeys(GATES, "float32")
FORWARD_ONLY = True


def programs(draw, sizes):
    size = {"b": pick(draw, 1, 2, 3, 5), "t": pick(draw, 1, 7, 16, 40), "n": pick(draw, 1, 2, 3, 5), **heads(draw)}
    size |= {"d": pick(draw, 8, 16, 32), "e": pick(draw, 8, 16, 20)}
    options = {"block_size": pick(draw, 16, 1, 3, 8, 64)}
    operands = dict(q="b h d", k="b t g d", v="b t g e", sequence_end="b", block_indices="b g n")
    dtypes = dict(sequence_end=pick(draw, *["int32"] * 4, "int64", "uint32", "int16"))
    dtypes["block_indices"] = pick(draw, *["int32"] * 4, "int64", "int8")
    if chance(draw, 40):
        options["window"] = pick(draw, 1, 5, 40, (3, None), (2, 2), (None, 0))
    if chance(draw, 40):
        size["x"] = size["t"] // options["block_size"] + pick(draw, 0, 1)
        operands |= dict(k_cmp="b x g d", v_cmp="b x g e")
        dtypes |= dict.fromkeys(("k_cmp", "v_cmp"), pick(draw, "call", "float32"))
        operands["g_cmp"] = "b h"
    if chance(draw, 40):
        operands["g_slc"] = "b h"
    if "window" in options and chance(draw, 40):
        operands["g_swa"] = "b h"
    for gate in [name for name in GATES if name in operands]:
        dtypes[gate] = pick(draw, "call", "float32", "bfloat16")
    if chance(draw, 20):
        options["softmax_scale"] = pick(draw, 0.5, 1, -0.3)
    if chance(draw, 10):
        options["return_block_indices"] = True
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name in GATES:
        return rng.uniform(-1, 1, shape)
    if name == "sequence_end":
        return rng.integers(0, call.sizes["t"] + 3, shape).astype(np.int32)
    if name == "block_indices":
        return rng.integers(-1, call.sizes["t"] // call.options["block_size"] + 2, shape)
    return None


def facts(call, x):
    """Who sees whom in each branch, [B, H or 1, 1, keys]."""
    size, repeat = call.options["block_size"], call.sizes["h"] // call.sizes["g"]
    end = np.minimum(x["sequence_end"].astype(np.int64), call.sizes["t"])[:, None, None, None]
    j, block = np.arange(call.sizes["t"]), np.arange(call.sizes.get("x", 0))
    listed = (x["block_indices"].astype(np.int64)[..., None] == j // size).any(2)[:, :, None]
    left, _ = flash_window(call.options.get("window"))
    return {
        "selected": np.repeat(listed & (j < end), repeat, axis=1),
        "ended": block < end // size,
        "window": (j < end) & (j >= end - 1 - left),
        "lists": x["block_indices"].astype(np.int64),
    }


def hidden(call, x):
    """Keys that no query of their group sees in any branch, means of later blocks, and what has no keys."""
    of, groups = facts(call, x), call.sizes["g"]
    seen = of["selected"][:, :: call.sizes["h"] // groups, 0]  # b g t
    if "window" in call.options:
        seen = seen | of["window"][:, 0]
    keys, means = ~seen.swapaxes(1, 2)[..., None], ~of["ended"][:, 0, 0, :, None, None]
    empty = x["sequence_end"] <= 0
    found = {"q": empty[:, None, None], "k": keys, "v": keys} | {g: empty[:, None] for g in GATES if g in x}
    found |= {name: means for name in ("k_cmp", "v_cmp") if name in x}
    return {name: np.broadcast_to(a, call.shape(name)) for name, a in found.items()}


def results(call):
    found = [("b h e", call.type("q"))]
    return found + [("b g n", np.dtype("int32"))] * bool(call.options.get("return_block_indices"))


def sensitivity(call, x):
    """The relative error of weights."""
    return logits_rounded(call, x, [x[name] for name in ("k", "k_cmp") if name in x])
