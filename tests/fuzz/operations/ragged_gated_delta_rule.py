"""Calls of ragged_gated_delta_rule, which has no derivative. The tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.ragged_gated_delta_rule import formula
from . import gated_delta_rule as dense
from ._draws import along, chance, cuts, heads, pick, tokens_past

__all__ = ["formula"]

SHARE = 1
SPLIT = ()
DTYPES = {"states": "float32"}
FORWARD_ONLY = True


def programs(draw, sizes):
    size = {"t": pick(draw, *sizes.lengths), **heads(draw), "d": pick(draw, *sizes.features)}
    n = pick(draw, 1, 2, 3, 5)
    size |= {"e": pick(draw, *sizes.features), "n": n, "m": n + 1, "p": n + pick(draw, 0, 1, 3)}
    operands = dict(q="t g d", k="t g d", v="t h e", beta="t h", g="t h", states="p h d e")
    operands |= dict(query_start_loc="m", state_indices="n")
    options, dtypes = {}, {"states": pick(draw, "float32", "float32", "call")}
    if chance(draw, 30):
        options["use_qk_l2norm"] = False
    if chance(draw, 30):
        options["softmax_scale"] = pick(draw, 0.25, 1.0, -0.5, 0.0, 1)
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(chunk_size=pick(draw, 8, 16, 33))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "query_start_loc":
        return cuts(rng, call.sizes["n"], call.sizes["t"])
    if name == "state_indices":
        return rng.permutation(call.sizes["p"])[: call.sizes["n"]].astype(np.int32)
    return dense.values(call, name, rng, shape)


def facts(call, x):
    token, starts = np.arange(call.sizes["t"])[:, None], x["query_start_loc"].astype(np.int64)
    owner = (starts[:-1] <= token) & (token < starts[1:])
    slot = np.zeros((call.sizes["n"], call.sizes["p"]), bool)
    slot[np.arange(call.sizes["n"]), x["state_indices"]] = True
    slot &= owner.any(0)[:, None]
    return {"owner": owner @ slot}  # [T, slots]


def hidden(call, x):
    """Tokens of no sequence."""
    past = tokens_past(x["query_start_loc"], call.sizes["t"])
    return {name: along(past, 0, call.shape(name)) for name in ("q", "k", "v", "beta", "g")}


def sensitivity(call, x):
    of_batch = {"g": x["g"][None]} if "g" in x else {}
    return dense.sensitivity(call, of_batch)


def results(call):
    return [("t h e", call.type("q")), ("p h d e", call.type("states"))]
