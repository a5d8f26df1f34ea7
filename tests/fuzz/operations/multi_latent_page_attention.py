"""Calls of multi_latent_page_attention, which has no derivative; tables fit together whichever seeds they are of."""

import numpy as np

from ..formulas.multi_latent_page_attention import formula
from . import ragged_page_attention as ragged
from ._cache import draw_options, hidden_pages, hidden_slots
from ._draws import along, chance, logits_rounded, pick

__all__ = ["formula"]

SHARE = 1
SPLIT = ()
DTYPES = {"sinks": "float32", "k_scale": "float32"}
FORWARD_ONLY = True
REFUSED = {"pallas": ("k_scale", "draft_mask", "indices", "batch_invariant")}
# Of latents that are as wide as those of models; few tokens and pages, so that a call is cheap.
ON = {"pallas": dict(steps=(1, 3, 8, 16), latent_features=((512, 64),), pages=(16, 32, 64), columns=(1, 2), draws=5)}


def programs(draw, sizes):
    n, size = pick(draw, *sizes.sequences), {"t": pick(draw, *sizes.steps), "h": pick(draw, 1, 2, 3, 16)}
    size |= {"w": pick(draw, 1, 3, 8)}
    size["c"], size["d"] = pick(draw, *sizes.latent_features)
    size |= {
        "z": pick(draw, *sizes.pages),
        "n": n,
        "m": n + 1,
        "j": pick(draw, *sizes.columns),
        "p": pick(draw, 1, 4, 12),
    }
    size["f"] = size["c"] + size["d"]
    operands = dict(q_latent="t h c", q_rope="t h d", pages="p z f", context_lens="n", block_tables="n j")
    operands |= {"query_start_loc": "m", "num_seqs": pick(draw, "1", "")}
    options, dtypes = {}, {}
    draw_options(draw, operands, options, dtypes, most_splits=size["j"])
    if chance(draw, 25):
        dtypes["pages"] = pick(draw, "int8", "float8_e4m3fn")
    if chance(draw, 25):
        operands["k_scale"] = pick(draw, "", "1", "p z 1")
    if chance(draw, 30):
        operands["draft_mask"] = "t w"
    if chance(draw, 30):
        operands["indices"], size["k"] = "t k", pick(draw, 1, 3, 20, 100)
        dtypes["indices"] = pick(draw, *["int32"] * 4, "int16")
    if chance(draw, 10):
        options["batch_invariant"] = True
    if sizes.configs and chance(draw, 20):
        options["config"] = dict(queries_per_block=pick(draw, 1, 3, 8), pages_per_block=pick(draw, 1, 2, 16))
    return operands, size, options, dtypes


def values(call, name, rng, shape):
    if name == "indices":
        return rng.integers(-2, call.sizes["j"] * call.sizes["z"] + 2, shape).astype(np.int32)
    return ragged.values(call, name, rng, shape)


def facts(call, x):
    """As of ragged_page_attention; given lists, also which of their places [T,k] are keys, and their positions."""
    seen = ragged.facts(call, x)
    if "indices" not in x:
        return seen
    length, indices = seen["visible"].shape[1], x["indices"].astype(np.int64)
    positions = np.clip(indices, 0, length - 1)
    listed = (positions == indices) & np.take_along_axis(seen["visible"], positions, 1)
    is_named = np.zeros((len(indices), length + 1), bool)
    np.put_along_axis(is_named, np.where(listed, positions, length), True, 1)
    return seen | {"visible": is_named[:, :-1], "positions": positions, "listed": listed}


def hidden(call, x):
    """Tokens of no sequence, and slots that nobody sees."""
    seen = facts(call, x)
    slots = hidden_slots(call, seen["pages"], seen["visible"])
    tokens = {name: along(~seen["inside"], 0, call.shape(name)) for name in ("q_latent", "q_rope")}
    return tokens | hidden_pages(call, x, slots, ("pages",))


def sensitivity(call, x):
    """The relative error of weights."""
    scale = np.max(x.get("k_scale", np.ones(1)), initial=0)
    q = np.concatenate([x["q_latent"], x["q_rope"]], -1)
    by = call.options.get("softmax_scale", call.sizes["f"] ** -0.5)
    return logits_rounded(call, x | {"q": q, "softmax_scale": by}, [x["pages"].astype(np.float64) * scale])


def results(call):
    statistics = np.promote_types(call.type("q_latent"), np.float32)
    return [("t h c", call.type("q_latent")), *[("t h", statistics)] * bool(call.options.get("return_lse"))]
