"""What the calls of both state spaces of Mamba share."""

import numpy as np

from ._draws import along, chance, cuts, pick, tokens_past
from ._recurrence import facts

__all__ = ["DTYPES", "draw_call", "facts", "hidden", "results", "sensitivity", "values"]

DTYPES = {"initial_state": "float32"}


def draw_call(draw, sizes, size, axes, state):
    size = {"b": pick(draw, 1, 2, 3), "s": pick(draw, *sizes.lengths), **size, "d": pick(draw, *sizes.features)}
    operands, options, dtypes, batch, states = {}, {}, {}, "b", "b"
    if chance(draw, 30):
        del size["b"]
        size |= {"m": (n := pick(draw, 1, 2, 4, 5)) + 1, "n": n}
        batch, states = "1", "n"
        operands["cu_seqlens"] = "m"
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32")
    operands = {name: of if name in "AD" else f"{batch} {of}" for name, of in axes.items()} | operands
    for name in ("A", "D", "dt"):
        if chance(draw, 40):
            dtypes[name] = pick(draw, "float32", "bfloat16", "call")
    if chance(draw, 40):
        operands["initial_state"] = f"{states} {state}"
        dtypes["initial_state"] = pick(draw, "float32", "float32", "call")
    if chance(draw, 60):
        options["return_state"] = True
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(chunk_size=pick(draw, 8, 16, 33))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "cu_seqlens":
        return cuts(rng, call.sizes["n"], call.sizes["s"])
    if name == "A":
        return -np.exp(rng.standard_normal(shape)) * rng.choice([0, 0.1, 1, 10], p=[0.1, 0.4, 0.4, 0.1])
    if name == "dt":
        return np.log1p(np.exp(rng.standard_normal(shape) - 1)) * rng.choice([0, 1], shape, p=[0.1, 0.9])
    return None


def sensitivity(call, x):
    """The relative error of a decay exp(dt·A) in a 16-bit call, of which matrix units keep 22 bits of the sum over a
    chunk; a decay of exp(−128) is 0.
    """
    if call.type("x").itemsize != 2 or 0 in x["dt"].shape:
        return 0.0
    largest = np.abs(x["A"].astype(np.float64)).max() * np.abs(x["dt"].astype(np.float64)).sum(1).max()
    return 2.0**-22 * min(128.0, float(largest))


def hidden(call, x):
    """Tokens of no sequence."""
    if "cu_seqlens" not in x:
        return {}
    past = tokens_past(x["cu_seqlens"], call.sizes["s"])
    return {name: along(past, 1, call.shape(name)) for name in ("x", "B", "C", "dt")}


def results(call, y, state):
    batch, states = ("1", "n") if "cu_seqlens" in call.operands else ("b", "b")
    statistics = np.promote_types(call.type("x"), np.float32)
    found = [(f"{batch} {y}", call.type("x"))]
    return found + [(f"{states} {state}", statistics)] * bool(call.options.get("return_state"))
