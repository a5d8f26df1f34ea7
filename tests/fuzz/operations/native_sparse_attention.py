"""Calls of native_sparse_attention with given blocks: a choice of them is not continuous in q and k."""

from dataclasses import replace

import numpy as np

from ..formulas import flash_attention as flash_formula
from ..formulas.native_sparse_attention import formula
from . import flash_attention as flash
from ._draws import chance, cuts, draw_scale, heads, logits_rounded, pick, scale, seldom

__all__ = ["formula"]

SHARE = 2
SPLIT = flash.SPLIT
GATES = ("g_cmp", "g_slc", "g_swa")
# Of the kernels of Mosaic GPU for the selected branch: the others are those of flash_attention, which take many keys.
REFUSED = {"pallas": ("vjp", "softmax_scale", "window", "g_cmp", "g_swa")}
ON = {
    "pallas": dict(
        lengths=(64, 100, 256, 192, 300),
        attention_features=(64, 128, 64, 128, 192, 64, 128),
    )
}
HEADS = ((16, 1), (32, 1), (32, 2), (64, 1), (16, 1))
DTYPES = {"softmax_scale": "float32", **dict.fromkeys(GATES, "float32")}


def programs(draw, sizes):
    S = pick(draw, *sizes.lengths)
    K = S if chance(draw, 60) else pick(draw, *sizes.lengths)
    D = pick(draw, *sizes.attention_features)
    V = D if chance(draw, 60) else pick(draw, *sizes.attention_features)
    size = {"b": pick(draw, 1, 2, 3), "s": S, "t": K, "d": D, "e": V, "n": pick(draw, 1, 2, 3, 5), **heads(draw)}
    operands, options, dtypes, batch, keys = {}, {"block_size": pick(draw, 16, 1, 3, 8, 64)}, {}, "b", "t"
    of_hopper = sizes.platform == "pallas" and not seldom(draw)
    if of_hopper:
        size["h"], size["g"] = pick(draw, *HEADS)
        options["block_size"] = pick(draw, 64, 128, 192, 64)
    if chance(draw, 30) and not of_hopper:
        del size["b"]
        size |= dict(t=S, m=pick(draw, 2, 3, 5, 6))
        operands, batch, keys = {"cu_seqlens": "m"}, "1", "s"
        dtypes["cu_seqlens"] = pick(draw, *["int32"] * 4, "int64", "uint32")
    operands |= dict(q=f"{batch} s h d", k=f"{batch} {keys} g d", v=f"{batch} {keys} g e")
    operands["block_indices"] = f"{batch} s g n"
    dtypes["block_indices"] = pick(draw, *["int32"] * 4, "int64", "int8")
    if chance(draw, 40):
        options["window"] = pick(draw, 1, 5, 40, (3, None), (2, 2), (None, 0))
    for gate in GATES:
        if chance(draw, 40) and (gate != "g_swa" or "window" in options):
            operands[gate] = f"{batch} s h"
            dtypes[gate] = pick(draw, "call", "float32", "bfloat16")
    draw_scale(draw, operands, options)
    if chance(draw, 10):
        options["return_block_indices"] = True
    if sizes.configs and chance(draw, 25):
        options["config"] = dict(block_q=pick(draw, 1, 5, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "softmax_scale":
        return scale(rng, shape)
    if name in GATES:
        return rng.uniform(-1, 1, shape)
    if name == "cu_seqlens":
        return cuts(rng, call.sizes["m"] - 1, call.sizes["s"])
    if name == "block_indices":
        blocks = min(100, call.sizes["t"] // call.options["block_size"] + 1)
        x = rng.integers(-1, blocks + 1, shape)
        return np.where(rng.random(shape) < rng.choice([0.0, 0.9]), -1, x)
    return None


def positions(call, x):
    """Of each query and of each key its sequence, and its place in it."""
    (S, K), x = (call.sizes["s"], call.sizes["t"]), x.get("cu_seqlens")
    if x is None:
        return np.zeros(S, int), np.arange(S) + K - S, np.zeros(K, int), np.arange(K)
    number, place, _ = flash_formula.places(x, S)
    return number, place, np.where(number < 0, -2, number), place


def facts(call, x):
    """Who sees whom in each branch, [B or 1, H or 1, S, keys], and each token's share of the mean of its block."""
    size, repeat = call.options["block_size"], call.sizes["h"] // call.sizes["g"]
    n, i, m, j = positions(call, x)
    before = (n[:, None] == m) & (j <= i[:, None])
    listed = (x["block_indices"].astype(np.int64)[:, :, :, None] == (j // size)[:, None]).any(-1)  # b s g t
    left, right = flash_window(call.options.get("window"))
    distance = j - i[:, None]
    near = before & (distance >= -left) & (distance <= right)
    of_block = np.unique(np.stack([m, j // size])[:, m >= 0], axis=1)  # sequence, number
    inside = (of_block[0][:, None] == m) & (of_block[1][:, None] == j // size)
    whole = inside.sum(1) == size
    ended = (n[:, None] == of_block[0]) & ((of_block[1] + 1) * size <= i[:, None] + 1) & whole
    selected = (listed & before[:, None]).transpose(0, 2, 1, 3) if listed.size else listed.transpose(0, 2, 1, 3)
    return {
        "selected": np.repeat(selected, repeat, axis=1),
        "ended": ended[None, None],
        "window": near[None, None],
        "share": inside / size,
        "lists": x["block_indices"].astype(np.int64),
    }


def flash_window(window):
    if isinstance(window, int):
        return window - 1, 0
    return tuple(2**40 if a is None else a for a in window or (None, None))


def visible(call, x):
    """Whether a query sees a key in any branch: [B, H, S, K]."""
    of = facts(call, x)
    found = of["selected"]
    if "window" in call.options:
        found = found | of["window"]
    if "g_cmp" in call.operands:
        found = found | np.einsum("sx,xt->st", of["ended"][0, 0].astype(int), (of["share"] > 0).astype(int)).astype(
            bool
        )
    return found


def hidden(call, x):
    """Keys that no query of their group sees in any branch, queries that see nothing, and gates of no place."""
    seen_by = visible(call, x)
    B, H, _, K = seen_by.shape
    groups = call.sizes["g"]
    keys = seen_by.any(2).reshape(B, groups, H // groups, K).any(2).swapaxes(1, 2)[..., None]
    n, i, *_ = positions(call, x)
    outside = (n < 0) | (i < 0)
    queries = np.broadcast_to(outside[:, None], (B, len(i), H)) if "softmax_scale" in x else _nothing(seen_by)
    found = {"q": queries[..., None], "k": ~keys, "v": ~keys} | {g: outside[:, None] for g in GATES if g in x}
    return {name: np.broadcast_to(a, call.shape(name)) for name, a in found.items()}


def _nothing(seen_by):
    """[B, S, H]: the queries that see nothing."""
    return ~seen_by.any(3).swapaxes(1, 2)


def unheard(call, x):
    n, i, *_ = positions(call, x)
    outside = ((n < 0) | (i < 0))[:, None]
    gated = any(gate in call.operands for gate in GATES)
    shape = call.shape("q")[:3]
    silent = np.broadcast_to(outside, shape) if gated else _nothing(visible(call, x))
    return [np.broadcast_to(silent[..., None], (*shape, call.sizes["e"]))]


def results(call):
    batch = call.operands["q"].split()[0]
    found = [(f"{batch} s h e", call.type("q"))]
    return found + [(f"{batch} s g n", np.dtype("int32"))] * bool(call.options.get("return_block_indices"))


def sensitivity(call, x):
    """The relative error of weights."""
    return logits_rounded(call, x, [x["k"]])


def magnitude(call, x, u, t):
    """That of flash_attention, once for each branch, and of the gates."""
    of_flash = tuple(n for n in call.wrt if n not in GATES)
    found = flash.magnitude(replace(call, wrt=of_flash), x, u[:1], t)
    size = lambda a: (
        float(np.sqrt((np.where(np.isfinite(a), a, 0).astype(np.float64) ** 2).sum(-1).mean())) if a.size else 0.0
    )
    if call.derivative in ("jvp", "linearize"):
        moved = sum(size(x["v"]) for n in GATES if n in (t or {}))
        more = bool(call.options.get("return_block_indices"))
        return found[0][:1] + [0.0] * more, [3 * found[1][0] + moved] + [0.0] * more
    of = found if isinstance(found, dict) else found[1]
    of = {n: 3 * a for n, a in of.items()} | {n: size(u[0]) * size(x["v"]) for n in call.wrt if n in GATES}
    of = {n: of[n] for n in call.wrt}
    return of if isinstance(found, dict) else ([0.0] * len(u), of)
