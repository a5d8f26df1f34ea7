"""Calls of ragged_decode_attention, which has no derivative."""

import numpy as np

from ..formulas.ragged_decode_attention import formula
from ._cache import draw_options, left_of
from ._draws import chance, heads, logits_rounded, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ("b",)
DTYPES = {"sinks": "float32"}
FORWARD_ONLY = True


def programs(draw, sizes):
    size = {"b": pick(draw, 1, 2, 3, 5, 20), "d": pick(draw, 8, 16, 32), "e": pick(draw, 8, 16, 20), **heads(draw)}
    size["t"] = pick(draw, 1, 7, 16, 40)
    operands = dict(q="b h d", k="b t g d", v="b t g e", sequence_start="b", sequence_end="b")
    options, dtypes = {}, {}
    draw_options(draw, operands, options, dtypes, most_splits=size["t"])
    if sizes.configs and chance(draw, 20):
        options["config"] = dict(queries_per_block=pick(draw, 1, 3, 8), keys_per_block=pick(draw, 1, 5, 64))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    most = call.sizes["t"]
    if name == "sequence_start":
        return rng.integers(0, most // 2 + 1, shape).astype(np.int32)
    return rng.integers(0, most + 3, shape).astype(np.int32) if name == "sequence_end" else None


def facts(call, x):
    """Which of its keys a sequence sees; each is there."""
    j, left = np.arange(call.sizes["t"])[None], left_of(call)
    start, end = (x[name].astype(np.int64)[:, None] for name in ("sequence_start", "sequence_end"))
    end = np.minimum(end, call.sizes["t"])
    visible = (start <= j) & (j < end)
    if left is not None:
        visible &= j >= end - 1 - left
    return {"inside": np.ones(call.sizes["b"], bool), "visible": visible}


def hidden(call, x):
    """Keys and values that are not seen."""
    masked = ~facts(call, x)["visible"][:, :, None, None]
    return {name: np.broadcast_to(masked, call.shape(name)) for name in ("k", "v")}


def sensitivity(call, x):
    """The relative error of weights."""
    return logits_rounded(call, x, [x["k"]])


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    return [("b h e", call.type("q")), *[("b h", statistics)] * bool(call.options.get("return_lse"))]
