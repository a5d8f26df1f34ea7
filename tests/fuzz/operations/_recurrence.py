"""What the calls of the operations over the linear recurrence share."""

import numpy as np

from ..formulas.recurrent import owners
from ._draws import along, chance, cuts, draw_scale, heads, pick, scale, tokens_past

SPLIT = ("b", "h", "g")
DTYPES = {"softmax_scale": "float32", "initial_state": "float32", "g_gamma": "float32"}
GATES = ("g", "gk", "gv", "g_gamma")
CHUNK = 64  # tokens, at most
OF_TOKENS = ("q", "k", "v", "g", "gk", "gv")


def draw_call(draw, sizes, gates):
    size = {"b": pick(draw, 1, 2, 3), "s": pick(draw, *sizes.lengths), **heads(draw)}
    size["d"] = pick(draw, *sizes.features)
    size["e"] = size["d"] if chance(draw, 50) else pick(draw, *sizes.features)
    operands, options, dtypes = {}, {}, {}
    batch, states = "b", "b"
    if chance(draw, 30):
        del size["b"]
        size |= {"m": (n := pick(draw, 1, 2, 4, 5)) + 1, "n": n}
        batch, states = "1", "n"
        operands["cu_seqlens"] = "m"
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32")
    axes = dict(q="s h d", k="s g d", v="s g e", g="s h", gk="s h d", gv="s h e")
    operands = {n: f"{batch} {axes[n]}" for n in ("q", "k", "v", *gates) if n in axes} | operands
    if "g_gamma" in gates:
        operands["g_gamma"] = "h"
    for name in gates:
        if chance(draw, 40):
            dtypes[name] = pick(draw, "float32", "bfloat16", "call")
    if chance(draw, 40):
        operands["initial_state"] = f"{states} h d e"
        dtypes["initial_state"] = pick(draw, "float32", "float32", "call")
    draw_scale(draw, operands, options)
    options |= {name: True for name, percent in (("reverse", 30), ("return_state", 60)) if chance(draw, percent)}
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(chunk_size=pick(draw, 8, 16, 33), subchunk_size=pick(draw, 4, 8, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "softmax_scale":
        return scale(rng, shape)
    if name == "cu_seqlens":
        return cuts(rng, call.sizes["n"], call.sizes["s"])
    if name in GATES:
        x = -np.abs(rng.standard_normal(shape)) * rng.choice([0, 0.1, 1, 30], p=[0.1, 0.4, 0.4, 0.1])
        if rng.random() < 0.1:  # growth, of which float32 holds what second derivatives multiply
            x = np.minimum(-0.1 * x, 40 / max(1, call.sizes["s"]))
        return np.where(rng.random(shape) < 0.1, -np.inf, x) if call.infinite else x
    return None


def facts(call, x):
    if "cu_seqlens" not in x:
        return {"owner": np.ones((call.sizes["s"], 1), bool)}
    return {"owner": owners(x["cu_seqlens"], call.sizes["s"]), "packed": np.zeros(())}


def sensitivity(call, x):
    """The relative error of decays in a 16-bit call: differences of sums of a chunk's log decays in float32, of which
    matrix units keep 22 bits. A decay of exp(−128) is 0; the errors of several, whose product it is, add up.
    """
    if call.type("q").itemsize != 2:
        return 0.0
    gates = [np.maximum(x[name].astype(np.float64), -128) for name in ("g", "gk", "gv") if name in x and x[name].size]
    chunks = [[a[:, at : at + CHUNK] for at in range(0, a.shape[1], CHUNK)] for a in gates]
    of_heads = CHUNK * np.abs(np.maximum(x["g_gamma"].astype(np.float64), -128)).max() if "g_gamma" in x else 0.0
    return 2.0**-22 * (of_heads + sum(max(np.abs(chunk.cumsum(1)).max() for chunk in of) for of in chunks))


def hidden(call, x):
    """Tokens of no sequence."""
    if "cu_seqlens" not in x:
        return {}
    past = tokens_past(x["cu_seqlens"], call.sizes["s"])
    return {name: along(past, 1, call.shape(name)) for name in OF_TOKENS if name in x}


def results(call):
    batch, states = ("1", "n") if "cu_seqlens" in call.operands else ("b", "b")
    statistics = np.promote_types(call.type("q"), np.float32)
    found = [(f"{batch} s h e", call.type("q"))]
    return found + [(f"{states} h d e", statistics)] * bool(call.options.get("return_state"))
