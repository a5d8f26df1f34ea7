"""Calls of ragged_page_attention_v3, which has no derivative. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.ragged_page_attention_v3 import formula
from ._cache import draw_options, left_of, longest_in_step
from ._draws import along, heads, logits_rounded, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ()
DTYPES = {"sinks": "float32"}
FORWARD_ONLY = True
REFUSED = {"pallas": ("window", "softcap", "sinks")}


def programs(draw, sizes):
    n, size = (
        pick(draw, *sizes.sequences),
        {"t": pick(draw, *sizes.steps), "d": pick(draw, *sizes.paged_features), **heads(draw)},
    )
    size |= {"z": pick(draw, *sizes.pages), "n": n, "m": n + 1, "j": pick(draw, *sizes.columns)}
    size |= {"c": 2 * size["g"], "p": n * size["j"] + pick(draw, 0, 1, 3)}
    operands = dict(q="t h d", k="t g d", v="t g d", kv_pages="p z c d", context_lens="n", block_tables="n j")
    operands |= {"query_start_loc": "m", "num_seqs": pick(draw, "1", "")}
    options, dtypes = {}, {}
    draw_options(draw, operands, options, dtypes)
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    size = call.sizes
    most, longest = size["j"] * size["z"], longest_in_step(size)
    if name == "context_lens":  # no shorter than the tokens of its step
        return rng.integers(min(longest, most), most + 1, shape).astype(np.int32)
    if name == "block_tables":
        return rng.permutation(size["p"])[: size["n"] * size["j"]].reshape(shape).astype(np.int32)
    if name == "query_start_loc":
        lengths = rng.integers(0, min(longest, most) + 1, size["n"])
        return np.minimum(np.append(0, np.cumsum(lengths)), size["t"]).astype(np.int32)
    return np.full(shape, rng.integers(1, size["n"] + 1), np.int32) if name == "num_seqs" else None


def _places(call, x):
    """Of each token its sequence (−1: none), position, and the places of the positions of its sequence; of each
    sequence how many positions it has.
    """
    size, starts = call.sizes, x["query_start_loc"].astype(np.int64)
    count, token = int(np.reshape(x["num_seqs"], ())), np.arange(size["t"])
    sequence = np.searchsorted(starts[1:], token, side="right")
    inside = (token >= starts[0]) & (token < starts[count])
    sequence = np.where(inside, np.minimum(sequence, size["n"] - 1), 0)
    contexts = x["context_lens"].astype(np.int64)
    position = contexts[sequence] - starts[sequence + 1] + token
    page = x["block_tables"].astype(np.int64)[:, :, None] * size["z"] + np.arange(size["z"])
    places = page.reshape(size["n"], -1)  # of every position of every sequence
    return inside, sequence, position, places, np.where(np.arange(size["n"]) < count, contexts, 0)


def facts(call, x):
    return facts_given(call, x, hidden(call, x)["kv_pages"][:, :, 0, 0])


def facts_given(call, x, holding_nan):
    """Of each token whether it is of a sequence, what it sees, where it is written, and the slots [P, page] that hold
    NaN after the step, given those that are not read.
    """
    inside, sequence, position, places, _ = _places(call, x)
    total, own = call.sizes["p"] * call.sizes["z"], places[sequence]
    j = np.arange(places.shape[1])
    left = left_of(call)
    visible = inside[:, None] & (j <= position[:, None])
    visible &= True if left is None else j >= position[:, None] - left
    at = np.where(inside, own[np.arange(len(own)), np.where(inside, position, 0)], -1)
    writes = np.arange(total)[:, None] == at
    unread = holding_nan.ravel() if call.poison else np.zeros(total, bool)
    return {
        "inside": inside,
        "visible": visible,
        "writes": writes,
        "slots": own[:, :, None] == np.arange(total),
        "unread": unread & ~writes.any(1),
    }


def hidden(call, x):
    """Tokens of no sequence; slots that belong to no context, or that the step writes before it reads them."""
    tokens, slots = unread(call, x)
    return tokens | {"kv_pages": np.broadcast_to(slots[:, :, None, None], call.shape("kv_pages"))}


def unread(call, x):
    """Where q, k and v are of no sequence; and the slots [P, page] that are not read."""
    inside, sequence, position, places, contexts = _places(call, x)
    used = np.zeros(call.sizes["p"] * call.sizes["z"], bool)
    for row, length in zip(places, contexts, strict=True):
        used[row[:length]] = True
    used[places[sequence, np.where(inside, position, 0)][inside]] = False
    tokens = {name: along(~inside, 0, call.shape(name)) for name in ("q", "k", "v")}
    return tokens, ~used.reshape(call.sizes["p"], call.sizes["z"])


def sensitivity(call, x):
    """The relative error of weights."""
    return logits_rounded(call, x, [x["k"], x["kv_pages"]])


def results(call):
    statistics = np.promote_types(call.type("q"), np.float32)
    lse = [("t h", statistics)] * bool(call.options.get("return_lse"))
    return [("t h d", call.type("q")), *lse, ("p z c d", call.type("kv_pages"))]
