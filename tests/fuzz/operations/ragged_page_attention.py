"""Calls of ragged_page_attention, which has no derivative. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.ragged_page_attention import formula
from ._cache import (
    draw_options,
    draw_quantised,
    hidden_pages,
    hidden_slots,
    left_of,
    longest_in_step,
    page_values,
    pages_of,
)
from ._draws import along, chance, heads, logits_rounded, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ()
DTYPES = {"sinks": "float32", "k_scale": "float32", "v_scale": "float32"}
FORWARD_ONLY = True
REFUSED = {"pallas": ("k_scale", "v_scale", "draft_mask", "window", "softcap", "sinks")}


def programs(draw, sizes):
    n, size = (
        pick(draw, *sizes.sequences),
        {"t": pick(draw, *sizes.steps), "d": pick(draw, *sizes.paged_features), **heads(draw)},
    )
    size |= {
        "z": pick(draw, *sizes.pages),
        "n": n,
        "m": n + 1,
        "j": pick(draw, *sizes.columns),
        "p": pick(draw, 1, 4, 12),
    }
    size |= {"c": 2 * size["g"], "w": pick(draw, 1, 3, 8)}
    operands = dict(q="t h d", kv_pages="p z c d", context_lens="n", block_tables="n j")
    operands |= {"query_start_loc": "m", "num_seqs": pick(draw, "1", "")}
    options, dtypes = {}, {}
    draw_options(draw, operands, options, dtypes, most_splits=size["j"])
    draw_quantised(draw, operands, options, dtypes, ("kv_pages",))
    if chance(draw, 30):
        operands["draft_mask"] = "t w"
    if sizes.configs and chance(draw, 20):
        options["config"] = dict(queries_per_block=pick(draw, 1, 3, 8), pages_per_block=pick(draw, 1, 2, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "query_start_loc":
        lengths = rng.integers(0, longest_in_step(call.sizes) + 1, call.sizes["n"])
        return np.minimum(np.append(0, np.cumsum(lengths)), call.sizes["t"]).astype(np.int32)
    if name == "num_seqs":
        return np.full(shape, rng.integers(1, call.sizes["n"] + 1), np.int32)
    return rng.random(shape) < 0.5 if name == "draft_mask" else page_values(call, name, rng, shape)


def facts(call, x):
    """Of each token the pages of its sequence, whether it is of any, and which of the keys in them it sees."""
    size, starts, contexts = call.sizes, x["query_start_loc"].astype(np.int64), x["context_lens"].astype(np.int64)
    count, token, left = int(np.reshape(x["num_seqs"], ())), np.arange(size["t"]), left_of(call)
    inside = (token >= starts[0]) & (token < starts[count])
    sequence = np.where(inside, np.minimum(np.searchsorted(starts[1:], token, side="right"), size["n"] - 1), 0)
    position = contexts[sequence] - starts[sequence + 1] + token
    inside &= position >= 0
    j = np.arange(size["j"] * size["z"])[None]
    visible = j <= position[:, None]
    if "draft_mask" in x:
        new = j - (contexts - np.diff(starts))[sequence][:, None]
        told = np.take_along_axis(x["draft_mask"], np.clip(new, 0, size["w"] - 1), 1) & (new < size["w"])
        visible = (j < contexts[sequence][:, None]) & ((new < 0) | told)
    if left is not None:
        visible &= j >= position[:, None] - left
    return {"pages": pages_of(call, x)[sequence], "inside": inside, "visible": visible & inside[:, None]}


def hidden(call, x):
    """Tokens of no sequence, and slots that nobody sees."""
    seen = facts(call, x)
    slots = hidden_slots(call, seen["pages"], seen["visible"])
    return {"q": along(~seen["inside"], 0, call.shape("q"))} | hidden_pages(call, x, slots, ("kv_pages",))


def sensitivity(call, x):
    """The relative error of weights."""
    scale = np.max(x.get("k_scale", np.ones(1)), initial=0)
    return logits_rounded(call, x, [x["kv_pages"].astype(np.float64) * scale])


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    return [("t h d", call.type("q")), *[("t h", statistics)] * bool(call.options.get("return_lse"))]
