"""Calls of flash_mla: c features of a latent, x of its keys without rotary part, y of the rotary part; d = x + y."""

import numpy as np

from . import flash_attention as flash
from ._case import Case, Operand
from ._feature import TOKENS, plain, sized

SIZES = dict(b=4, s=8, t=12, h=4, c=6, x=5, y=3, d=8, e=8)
TINY = dict(b=1, s=2, t=3, h=2, c=2, x=2, y=1, d=3, e=2)
LATENT = dict(q="b s h d", kv_latent="b t c", k_rope="b t y", w_kc="c h x", w_vc="c h e")


def case(name, sizes=(), operands=(), local=True, tiny=None, **options):
    results = ("b s h e", "b h s") if options.get("return_lse") else ("b s h e",)
    sizes, operands = {**SIZES, **dict(sizes)}, {**LATENT, **dict(operands)}
    return Case("flash_mla", name, sizes, operands, results, options, local, tiny)


CASES = (
    case("causal", causal=True, return_lse=True, tiny=TINY),
    case(
        "window_softcap_sinks",
        dict(s=12, n=2),
        dict(sinks="h n"),
        window=(4, 2),
        softcap=2.0,
        return_lse=True,
        tiny=dict(TINY, n=2),
    ),
    case(
        "segments_bias",
        dict(t=8),
        dict(
            q_segment_ids=Operand("b s", flash.segments), kv_segment_ids=Operand("b t", flash.segments), bias="b h s t"
        ),
        causal=True,
        return_lse=True,
    ),
    case(
        "dropout_traced_scale",
        operands=dict(softmax_scale=Operand("", flash.scalar), dropout_key=Operand("", flash.key)),
        local=False,
        causal=True,
        dropout_rate=0.3,
    ),
    case("few_queries", dict(s=1, t=16), return_lse=True),
    case(
        "few_queries_mask_sinks",
        dict(s=2, t=16, n=2),
        dict(mask=Operand("b h s t", flash.chance(0.7)), sinks="h n"),
        causal=True,
        window=(9, 0),
        softcap=2.0,
        return_lse=True,
    ),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, sizes=(), **values):
    """Projections that roughly preserve the length of a latent."""
    c = 12
    even = lambda rng, shape: rng.standard_normal(shape) / np.sqrt(c)
    values = dict(w_kc=even, w_vc=even) | values
    operands = {n: Operand(LATENT[n], make) for n, make in values.items()}
    sizes = {**dict(b=2, s=24, t=40, h=2, c=c, x=12, y=4, d=16, e=16), **dict(sizes)}
    return case(name, sizes, operands, causal=True, return_lse=True)


# As many queries as keys are taken with the keys and values of all heads, fewer are absorbed.
EXPANDED = dict(s=40)
LARGE = dict(q=lambda rng, shape: 30 * rng.standard_normal(shape))
PEAKS = dict(q=flash.peaks, kv_latent=flash.peaks)

FAMILIES = (
    family("normal", EXPANDED),
    family("large_logits", EXPANDED, **LARGE),
    family("one_hot_peaks", EXPANDED, **PEAKS),
    family("few_queries"),
    family("few_queries_large_logits", **LARGE),
    family("few_queries_one_hot_peaks", **PEAKS),
    family("long_uniform_rows", dict(s=8, t=512), q=lambda rng, shape: 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

PLAIN = plain("flash_mla", TOKENS | dict(c=96, x=64, y=32, d=96), LATENT)

FEATURES = flash.FEATURES | {"one head": sized("heads", h=1)}
FEATURES = {name: of for name, of in FEATURES.items() if name not in ("packed", "packed, bounded", "eight bits")}
