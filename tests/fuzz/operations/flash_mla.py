"""Calls of flash_mla: those of flash_attention that are not packed, of as many heads of keys as of queries."""

from dataclasses import replace

import numpy as np

from ..formulas.flash_mla import formula, projected
from . import flash_attention as flash
from ._draws import logits_rounded, pick

__all__ = ["facts", "formula", "results", "unheard"]

SHARE = 2
SPLIT = ("b", "h")
DTYPES = flash.DTYPES
REFUSED = {"triton": ("batch_invariant",), "pallas": (*flash.REFUSED["pallas"], "batch_invariant")}
ON = {"pallas": dict(attention_features=(64, 128, 80, 64, 192, 128, 128))}
OF_KEYS, OF_VALUES = ("kv_latent", "k_rope", "w_kc"), ("kv_latent", "w_vc")
facts, results, unheard = flash.facts, flash.results, flash.unheard


def programs(draw, sizes):
    operands, size, options, dtypes = flash.programs(draw, sizes)
    if "cu_seqlens_q" in operands:
        for of in (operands, dtypes):
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                del of[name]
        options = {n: x for n, x in options.items() if not n.startswith("max_seqlen")}
        size["b"] = 1
        del size["m"]
    del operands["k"], operands["v"], size["g"]
    size |= dict(c=pick(draw, 8, 1, 12, 32), y=pick(draw, *sizes.rope), x=size["d"])
    size["d"] += size["y"]
    operands |= dict(q="b s h d", kv_latent="b t c", k_rope="b t y", w_kc="c h x", w_vc="c h e")
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    """Projections of huge latents are not huge, too: a float32 does not tell exp(s − lse) of logits of 10¹²."""
    if name in ("w_kc", "w_vc") and call.values == "huge":
        return rng.standard_normal(shape)
    return flash.values(call, name, rng, shape)


def of_attention(call):
    """The call of flash_attention that it stands for."""
    operands = {n: axes for n, axes in call.operands.items() if n not in {*OF_KEYS, *OF_VALUES}}
    return replace(call, sizes=call.sizes | dict(g=call.sizes["h"]), operands=operands | KEYS_AND_VALUES)


KEYS_AND_VALUES = dict(k="b t g d", v="b t g e")


def hidden(call, x):
    """What flash_attention hides, and latents and rotary parts of keys that no head sees."""
    found = flash.hidden(of_attention(call), x)
    masked = (found.pop("k").all((2, 3)) & found.pop("v").all((2, 3)))[..., None]
    return found | {n: np.broadcast_to(masked, call.shape(n)) for n in ("kv_latent", "k_rope")}


def sensitivity(call, x):
    """The relative error of weights."""
    finite = {n: np.where(np.isfinite(a), a, 0).astype(np.float64) for n, a in x.items() if n in {*OF_KEYS, *OF_VALUES}}
    return logits_rounded(call, x, [projected(finite, np)[0]])


def magnitude(call, x, u, t):
    """That of the keys and values, and by the product rule of what they are made of."""
    wide = lambda of: {n: np.where(np.isfinite(a), a, 0).astype(np.float64) for n, a in of.items()}
    x, t = {**x, **wide({n: x[n] for n in {*OF_KEYS, *OF_VALUES}})}, t and {**t}
    k, v = projected(x, np)
    to = {}
    for one in t or ():
        if one in {*OF_KEYS, *OF_VALUES}:
            dk, dv = projected(x | wide({one: t[one]}), np)
            to["k"], to["v"] = to.get("k", 0) + np.abs(dk), to.get("v", 0) + np.abs(dv)
    of_k, of_v = not set(OF_KEYS).isdisjoint(call.wrt), not set(OF_VALUES).isdisjoint(call.wrt)
    wrt = [n for n in call.wrt if n not in {*OF_KEYS, *OF_VALUES}] + ["k"] * of_k + ["v"] * of_v
    inner = replace(of_attention(call), wrt=tuple(wrt))
    inner_call = flash.magnitude(inner, x | {"k": k, "v": v}, u, t and {**t, **to})
    if call.derivative in ("jvp", "linearize"):
        return inner_call
    found = inner_call if isinstance(inner_call, dict) else inner_call[1]
    size = lambda a: float(np.sqrt((a**2).mean())) if a.size else 0.0
    heads, tokens = np.sqrt(call.sizes["h"]), np.sqrt(call.sizes["t"] * call.sizes.get("b", 1))
    dk, dv = found.get("k", 0.0), found.get("v", 0.0)
    own = {
        "kv_latent": heads * (dk * size(x["w_kc"]) + dv * size(x["w_vc"])),
        "k_rope": heads * dk,
        "w_kc": tokens * dk * size(x["kv_latent"]),
        "w_vc": tokens * dv * size(x["kv_latent"]),
    }
    found = {n: own[n] if n in own else found[n] for n in call.wrt}
    return found if isinstance(inner_call, dict) else (inner_call[0], found)
