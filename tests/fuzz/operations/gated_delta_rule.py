"""Calls of gated_delta_rule."""

import jax.numpy as jnp
import numpy as np

from ..formulas.gated_delta_rule import formula
from ._draws import along, chance, cuts, heads, pick, tokens_past
from ._recurrence import SPLIT, facts, results
from ._recurrence import sensitivity as of_decays

__all__ = ["DTYPES", "SPLIT", "facts", "formula", "hidden", "results", "sensitivity", "values"]

SHARE = 1
DTYPES = {"initial_state": "float32"}


def programs(draw, sizes):
    size = {"b": pick(draw, 1, 2, 3), "s": pick(draw, *sizes.lengths), **heads(draw)}
    size["d"] = pick(draw, *sizes.features)
    size["e"] = size["d"] if chance(draw, 50) else pick(draw, *sizes.features)
    operands, options, dtypes, batch, states = {}, {}, {}, "b", "b"
    if chance(draw, 30):
        del size["b"]
        size |= {"m": (n := pick(draw, 1, 2, 4, 5)) + 1, "n": n}
        batch, states = "1", "n"
        operands["cu_seqlens"] = "m"
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32")
    axes = dict(q="s g d", k="s g d", v="s h e", beta="s h", g="s h")
    given = [name for name in axes if name != "g" or chance(draw, 80)]
    operands = {name: f"{batch} {axes[name]}" for name in given} | operands
    for name in ("beta", "g"):
        if name in operands and chance(draw, 40):
            dtypes[name] = pick(draw, "float32", "bfloat16", "call")
    if chance(draw, 40):
        operands["initial_state"] = f"{states} h d e"
        dtypes["initial_state"] = pick(draw, "float32", "float32", "call")
    if chance(draw, 30):
        options["softmax_scale"] = pick(draw, 0.25, 1.0, -0.5, 0.0, 1)
    if chance(draw, 30):
        options["use_qk_l2norm"] = False
    if chance(draw, 60):
        options["return_state"] = True
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(chunk_size=pick(draw, 8, 16, 33))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "cu_seqlens":
        return cuts(rng, call.sizes["n"], call.sizes["s"])
    if name == "beta":
        return np.clip(rng.uniform(-0.1, 1.1, shape), 0, 1)
    if name == "k" and call.options.get("use_qk_l2norm") is False:  # of a length of about 1, beyond which states grow
        return rng.standard_normal(shape) / np.sqrt(1.5 * shape[-1] + 4)
    if name == "g":
        x = -np.abs(rng.standard_normal(shape)) * rng.choice([0, 0.1, 1, 30], p=[0.1, 0.4, 0.4, 0.1])
        return np.where(rng.random(shape) < 0.1, -np.inf, x) if call.infinite else x
    return None


def sensitivity(call, x):
    """Also that of a state which a kernel rounds to 16 bits for its product with keys, on average a quarter of eps."""
    narrow = call.platform is not None and call.type("k").itemsize == 2
    return of_decays(call, x) + (0.25 * float(jnp.finfo(call.type("k")).eps) if narrow else 0.0)


def hidden(call, x):
    """Tokens of no sequence."""
    if "cu_seqlens" not in x:
        return {}
    past = tokens_past(x["cu_seqlens"], call.sizes["s"])
    return {name: along(past, 1, call.shape(name)) for name in ("q", "k", "v", "beta", "g") if name in x}
