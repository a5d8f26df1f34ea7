"""Calls of ring_attention: those of flash_attention over some devices, in the layouts and by the strategies."""

from ..formulas.ring_attention import formula, kept, visible
from . import flash_attention as flash
from ._draws import chance, pick
from .flash_attention import hidden, magnitude, results, sensitivity, summed, unheard, values

__all__ = ["formula", "hidden", "magnitude", "results", "sensitivity", "summed", "unheard", "values"]

SHARE = 1
SPLIT = ()
OVER = {"s": "y", "t": "y"}
DTYPES = flash.DTYPES
FLOATS = ("float32", "bfloat16", "float16", "call")
LENGTHS = (1, 2, 3, 4, 8, 10, 17)  # of what a device has, or of half of it in zigzag


def programs(draw, sizes):
    devices = pick(draw, 2, 2, 3, 4, 1)
    layout = pick(draw, "zigzag", "zigzag", "striped", "contiguous")
    strategy = pick(draw, "ring", "ring", "all_gather", "ulysses", "auto")
    of_device = devices * (2 if layout == "zigzag" and devices > 1 else 1)
    S = of_device * pick(draw, *LENGTHS)
    K = S if chance(draw, 60) else of_device * pick(draw, *LENGTHS)
    D, V = (pick(draw, *sizes.attention_features) for _ in "dv")
    h, g = pick(draw, (4, 4), (4, 2), (4, 1), (3, 3), (6, 3), (8, 4))
    size = {"b": pick(draw, 1, 2), "s": S, "t": K, "c": K, "d": D, "e": V, "h": h, "g": g, "y": devices}
    operands, dtypes = dict(q="b s h d", k="b t g d", v="b t g e"), {}
    options = dict(axis_name="y", layout=layout, strategy=strategy, causal=chance(draw, 60))
    if strategy == "all_gather" and layout == "striped" and devices > 1:
        options["causal"] = False
    elif chance(draw, 35):
        ends = (None, 0, 1, 3, 10, 40, 2**31)
        options["window"] = pick(draw, 1, 2, 5, 20) if chance(draw, 40) else (pick(draw, *ends), pick(draw, *ends))
    splits_heads = h % devices == 0 and g % devices == 0
    if strategy == "ulysses" and not splits_heads:
        options["strategy"] = strategy = "ring"
    if chance(draw, 25):
        operands |= dict(q_segment_ids="b s", kv_segment_ids="b t")
        dtypes["q_segment_ids"] = dtypes["kv_segment_ids"] = pick(draw, *flash.INTEGERS)
    if chance(draw, 25):
        operands["dropout_key"], options["dropout_rate"] = "", pick(draw, 0.1, 0.5, 0.9)
    for name in ("bias", "mask"):
        if strategy != "ulysses" and chance(draw, 20):
            axes = [pick(draw, "b", "1"), pick(draw, "h", "1"), pick(draw, "s", "1"), pick(draw, "c", "1")]
            operands[name] = " ".join(axes[pick(draw, 0, 0, 1, 2, 3) :])
    if "bias" in operands and chance(draw, 50):
        dtypes["bias"] = pick(draw, *FLOATS)
    if chance(draw, 20):
        operands["sinks"] = pick(draw, "h", "h 1", "h 3")
    flash.draw_scale(draw, operands, options)
    if chance(draw, 20):
        options["softcap"] = pick(draw, 0.5, 2.0, 30.0)
    if chance(draw, 60):
        options["return_lse"] = True
    options |= {name: True for name in ("deterministic", "batch_invariant") if chance(draw, 10)}
    return operands, size, options, dtypes


def facts(call, x):
    size, options = call.sizes["y"], call.options
    ids = (x["q_segment_ids"], x["kv_segment_ids"]) if "q_segment_ids" in x else None
    found = flash.facts_of_infinite(call, x)
    found["visible"] = visible(call.sizes["s"], call.sizes["t"], size, options, ids, x.get("mask"))
    if "dropout_key" in x:
        shape = tuple(call.sizes[letter] for letter in "bhst")
        found["kept"] = kept(x["dropout_key"], shape, options["dropout_rate"], options["layout"], size)
    return found
