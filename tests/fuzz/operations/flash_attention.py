"""Calls of flash_attention."""

import math

import numpy as np

from ..formulas.flash_attention import formula, kept, visible
from ._draws import along, chance, cuts, draw_scale, heads, logits_rounded, pick, scale, shape_of, tokens_past

__all__ = ["formula"]

SHARE = 4
SPLIT = ("b", "h", "g")
DTYPES = {"softmax_scale": "float32", "sinks": "float32", "bias": "float32"}
REFUSED = {"pallas": ("dropout_key", "dropout_rate")}
FLOATS = ("float32", "bfloat16", "float16", "call")
INTEGERS = ("int32", "int32", "int32", "int8", "uint8", "int16", "uint32", "int64")


def programs(draw, sizes):
    S = pick(draw, *sizes.lengths)
    K = S if chance(draw, 40) else pick(draw, *(sizes.keys or sizes.lengths))
    D = pick(draw, *sizes.attention_features)
    V = D if chance(draw, 60) else pick(draw, *sizes.attention_features)
    size = {"b": pick(draw, 1, 2, 3), "s": S, "t": K, "d": D, "e": V, **heads(draw)}
    kind = pick(draw, *sizes.kinds)
    operands = dict(q="b s h d", k="b t g d", v="b t g e")
    options, dtypes = {}, {}
    if kind == "packed":
        del size["b"]
        size["m"] = pick(draw, 2, 3, 5, 6)
        operands = dict(q="s h d", k="t g d", v="t g e", cu_seqlens_q="m", cu_seqlens_k="m")
        dtypes["cu_seqlens_q"], dtypes["cu_seqlens_k"] = (pick(draw, *["int32"] * 4, "int64", "uint32") for _ in "qk")
        for name, bound in (("max_seqlen_q", S), ("max_seqlen_k", K)):
            if chance(draw, 30):
                options[name] = pick(draw, bound, max(1, bound // 2), bound + 3)
    if kind == "segments":
        operands |= dict(q_segment_ids="b s", kv_segment_ids="b t")
        dtypes["q_segment_ids"] = dtypes["kv_segment_ids"] = pick(draw, *INTEGERS)
        if chance(draw, 10):
            dtypes["kv_segment_ids"] = "int32"
    for name in ("bias", "mask"):
        if chance(draw, 30 if name == "bias" else 20) and not (sizes.paired and kind == "packed"):
            batch = "1" if kind == "packed" else pick(draw, "b", "1")
            axes = [batch, pick(draw, "h", "1"), pick(draw, "s", "1"), pick(draw, "t", "1")]
            first = pick(draw, 0, 0, 1, 2, 3, 4)
            operands[name] = " ".join([*axes[:2], "s", "t"] if sizes.paired else axes[first:])
    if sizes.paired and not {"bias", "mask"}.isdisjoint(operands):
        size |= {"s": pick(draw, *sizes.paired), "t": pick(draw, *sizes.paired)}
        dtypes |= {"bias": "call"} if "bias" in operands else {}
    elif "bias" in operands and chance(draw, 50):
        dtypes["bias"] = pick(draw, *FLOATS)
    if chance(draw, 20):
        operands["sinks"] = pick(draw, "h", "h 1", "h 3")
        dtypes["sinks"] = pick(draw, *FLOATS)
    draw_scale(draw, operands, options)
    if chance(draw, 40):
        options["causal"] = True
    if chance(draw, 35):
        pair = (pick(draw, *sizes.window_ends), pick(draw, *sizes.window_ends))
        options["window"] = pick(draw, *sizes.windows) if chance(draw, 40) else pair
    if chance(draw, 20):
        options["softcap"] = pick(draw, 0.5, 2.0, 30.0, 5, 1e5)
    if chance(draw, 15):
        operands["dropout_key"], options["dropout_rate"] = "", pick(draw, 0.1, 0.5, 0.9, 0.0)
    if chance(draw, 60):
        options["return_lse"] = True
    options |= {name: True for name in ("deterministic", "batch_invariant") if chance(draw, 10)}
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(block_q=pick(draw, 8, 16, 33), block_k=pick(draw, 8, 16, 33))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "softmax_scale":
        return scale(rng, shape)
    if name == "dropout_key":
        return np.uint32(rng.integers(2**32))
    if name == "mask":
        x = rng.random(shape) < rng.choice([0.05, 0.5, 0.9])
        return x & ~along(np.arange(shape[-1]) % 3 == 1, len(shape) - 1, shape) if rng.random() < 0.5 and shape else x
    if name.startswith("cu_seqlens"):
        side = name[-1]
        longest = call.options.get(f"max_seqlen_{side}")
        return cuts(rng, call.sizes["m"] - 1, call.sizes["s" if side == "q" else "t"], longest)
    if name.endswith("segment_ids"):
        lowest = 0 if call.dtypes.get(name, "int32").startswith("u") else -1
        ids = rng.integers(lowest, 4, shape)
        ids = np.sort(ids, axis=1) if rng.random() < 0.6 else ids
        largest = np.iinfo(call.dtypes.get(name, "int32") if call.x64 else "int32").max
        return np.where(ids == 3, min(largest, np.iinfo(call.dtypes[name]).max), ids) if rng.random() < 0.2 else ids
    if name in ("bias", "sinks") and call.infinite:
        x = rng.standard_normal(shape)
        hidden = rng.random(shape) < rng.choice([0.2, 0.7])
        return np.where(hidden | _long_run(rng, shape), -np.inf, x)
    return None


def _long_run(rng, shape):
    """Most of the last axis, from its beginning or up to its end."""
    if not shape or rng.random() < 0.5:
        return False
    place, n = np.arange(shape[-1]), shape[-1]
    return place >= n // 4 if rng.random() < 0.5 else place < n - n // 4


def facts(call, x):
    S, K = call.sizes["s"], call.sizes["t"]
    cut = (x["cu_seqlens_q"], x["cu_seqlens_k"]) if "cu_seqlens_q" in x else None
    found = {"visible": _visible(call, x)}
    if "dropout_key" in x:
        shape = (call.sizes.get("b", 1), call.sizes["h"], S, K)
        found["kept"] = kept(x["dropout_key"], shape, call.options["dropout_rate"], cut)
    if cut is not None:
        found["inside"] = ~tokens_past(cut[0], S)
    return found | facts_of_infinite(call, x)


def facts_of_infinite(call, x):
    """Where biases and sinks are −∞, in calls that have such."""
    where = (("bias", "no_bias"), ("sinks", "no_sink")) if call.infinite else ()
    return {of: np.isneginf(x[name]) for name, of in where if name in x}


def _visible(call, x):
    ids = (x["q_segment_ids"], x["kv_segment_ids"]) if "q_segment_ids" in x else None
    cut = (x["cu_seqlens_q"], x["cu_seqlens_k"]) if "cu_seqlens_q" in x else None
    return visible(call.sizes["s"], call.sizes["t"], call.options, ids, cut, x.get("mask"))


def _seen(call, x):
    """Whether a query sees a key: [B, H, S, K] in full."""
    return np.broadcast_to(call.module.facts(call, x)["visible"], tuple(call.sizes.get(letter, 1) for letter in "bhst"))


def hidden(call, x):
    """Keys and values that no query of their group sees, queries that see nothing, biases of pairs that are masked."""
    ok, groups = _seen(call, x), call.sizes["g"]
    B, H, _, K = ok.shape
    keys = ok.any(2).reshape(B, groups, H // groups, K).any(2).swapaxes(1, 2)[..., None]
    used = {"q": ok.any(3).swapaxes(1, 2)[..., None], "k": keys, "v": keys}
    if "cu_seqlens_q" in x:
        used = {name: a[0] for name, a in used.items()}
    if "bias" in x:
        shape = (1,) * (4 - x["bias"].ndim) + x["bias"].shape
        shared = tuple(axis for axis, n in enumerate(shape) if n == 1)
        used["bias"] = np.broadcast_to(ok.any(shared, keepdims=True), shape).reshape(x["bias"].shape)
    return {name: ~np.broadcast_to(a, call.shape(name)) for name, a in used.items()}


def unheard(call, x):
    """For each result where nobody hears of its cotangent: o is 0 where a query sees nothing, lse −∞ without sinks."""
    nothing = ~_seen(call, x).any(3)
    silent = np.zeros_like(nothing) if "sinks" in x else nothing
    if "cu_seqlens_q" in x:
        silent = silent | tokens_past(x["cu_seqlens_q"], call.sizes["s"])
    found = [nothing.swapaxes(1, 2)[..., None], silent]
    found = [a[0] for a in found] if "cu_seqlens_q" in x else found
    return [np.broadcast_to(a, shape_of(call, axes)) for a, (axes, _) in zip(found, results(call), strict=False)]


def results(call):
    packed = "cu_seqlens_q" in call.operands
    statistics = np.promote_types(call.type("q"), np.float32)
    found = [("s h e" if packed else "b s h e", call.type("q"))]
    return found + [("h s" if packed else "b h s", statistics)] * bool(call.options.get("return_lse"))


def sensitivity(call, x):
    """The relative error of weights, also of those that derivatives make anew as exp(s − lse)."""
    return logits_rounded(call, x, [x["k"]])


def summed(call, name):
    """In the gradient of a bias, of which a number may stand for many pairs of queries and keys."""
    pairs = math.prod(call.sizes.get(letter, 1) for letter in "bhst")
    return pairs / max(1, math.prod(call.shape(name))) if name == "bias" else 0


def magnitude(call, x, u, t):
    """About how large the terms are that a number of each derivative is a sum of. They may cancel: of a query with one
    key the gradient is 0, as a difference of two products.
    """
    size = lambda a, axis=-1: (
        0.0 if a is None or a.size == 0 else float(np.sqrt((a.astype(np.float64) ** 2).sum(axis).mean()))
    )
    number = lambda a: size(a, ()) if a is not None and a.size else 0.0
    x = {n: np.where(np.isfinite(a), a, 0) for n, a in x.items() if n in ("q", "k", "v", "softmax_scale", "bias")}
    scale = number(x.get("softmax_scale")) or call.options.get("softmax_scale") or call.sizes["d"] ** -0.5
    of = {n: size(x[n]) for n in "qkv"}
    to = {n: size((t or {}).get(n)) for n in "qkv"}
    change = abs(scale) * (to["q"] * of["k"] + of["q"] * to["k"]) + number((t or {}).get("bias"))
    change += number((t or {}).get("softmax_scale")) * of["q"] * of["k"] + number((t or {}).get("sinks"))
    if call.derivative in ("jvp", "linearize"):
        results = [2 * change * of["v"] + to["v"], change][: len(call.module.results(call))]
        return [0.0] * len(results), results
    bar = [size(a) for a in u[:1]] + [number(a) for a in u[1:]]
    second = call.derivative not in ("vjp", "checkpoint", "checkpoint_saving_kernels")
    if second:
        of, bar = {n: of[n] + to[n] for n in "qkv"}, [a * (1 + change) for a in bar]
    ds = 2 * bar[0] * of["v"] / (1 - call.options.get("dropout_rate", 0)) + sum(bar[1:])
    rows, columns = np.sqrt(call.sizes["s"]), np.sqrt(call.sizes["t"])
    logits = {"bias": ds * rows, "sinks": ds * rows, "softmax_scale": ds * of["q"] * of["k"] * rows * columns}
    found = {"q": abs(scale) * ds * of["k"], "k": abs(scale) * ds * of["q"] * rows, "v": bar[0] * rows} | logits
    found = {n: found[n] for n in call.wrt}
    return found if second else ([0.0] * len(u), found)
