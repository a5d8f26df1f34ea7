"""Calls of flash_attention. With b = h = 4 and g = 2, eight devices can split the batch by four, the heads by two."""

import jax
import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, Feature, S, T, operand, option, plain, sized


def chance(of: float):
    """True with this probability, but all False in the first row, which is fully masked."""

    def values(rng, shape):
        x = rng.random(shape) < of
        x[..., :1, :] = False
        return x

    return values


def segments(rng, shape):
    """Three segments in a row, the last of them padding."""
    b, s = shape
    cuts = np.sort(rng.integers(1, max(s, 2), (b, 2)), axis=1)
    ids = (np.arange(s) >= cuts[:, :1]).astype(np.int32) + 1
    return np.where(np.arange(s) >= cuts[:, 1:], -1, ids)


def lengths(total: int):
    """cu_seqlens of sequences, one of them empty, that leave some tokens at the end without a sequence."""

    def values(rng, shape):
        cuts = np.sort(rng.integers(0, total, shape))
        cuts[0], cuts[2] = 0, cuts[1]
        return cuts.astype(np.int32)

    return values


def key(rng, shape):
    return jax.random.key(int(rng.integers(2**31)))


def scalar(rng, shape):
    return np.float64(rng.uniform(0.2, 0.5, shape))


SIZES = dict(b=4, s=8, t=12, h=4, g=2, d=8, e=8)
TINY = dict(b=1, s=2, t=3, h=2, g=1, d=2, e=2)
QKV = dict(q="b s h d", k="b t g d", v="b t g e")
PACKED = dict(q="s h d", k="t g d", v="t g e")


def case(name, sizes=(), operands=(), of=QKV, local=True, tiny=None, **options):
    o, lse = ("s h e", "h s") if of is PACKED else ("b s h e", "b h s")
    results = (o, lse) if options.get("return_lse") else (o,)
    sizes, operands = {**SIZES, **dict(sizes)}, {**of, **dict(operands)}
    return Case("flash_attention", name, sizes, operands, results, options, local, tiny)


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
    case("bias_mask", dict(t=9, g=4), dict(bias="h s t", mask=Operand("b 1 s t", chance(0.7))), return_lse=True),
    case(
        "segments",
        dict(t=8),
        dict(q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments)),
        causal=True,
        return_lse=True,
    ),
    case(
        "packed",
        dict(s=20, t=24, m=5),
        dict(cu_seqlens_q=Operand("m", lengths(20)), cu_seqlens_k=Operand("m", lengths(24))),
        of=PACKED,
        causal=True,
        window=(6, 0),
        return_lse=True,
    ),
    case(
        "dropout_traced_scale",
        operands=dict(softmax_scale=Operand("", scalar), dropout_key=Operand("", key)),
        local=False,
        causal=True,
        dropout_rate=0.3,
        return_lse=True,
    ),
    case("cross_one_kv_head", dict(s=5, g=1, d=16), tiny=TINY),
)


# --- For the tests of precision ---------------------------------------------------------------------------------------


def peaks(rng, shape):
    """Rows of length 30 in one direction each, so that a query's weight is all on the keys of its own direction."""
    return 30 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


def family(name, sizes=(), **values):
    operands = {n: Operand(QKV[n], make) for n, make in values.items()}
    return case(name, {**dict(b=2, s=24, t=40, d=16, e=16), **dict(sizes)}, operands, causal=True, return_lse=True)


FAMILIES = (
    family("normal"),
    family("large_logits", q=lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot_peaks", q=peaks, k=peaks),
    family("long_uniform_rows", dict(s=8, t=512), q=lambda rng, shape: 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

TOKENS_PACKED = PACKED | dict(cu_seqlens_q=Operand("m", lengths(S)), cu_seqlens_k=Operand("m", lengths(T)))
PLAIN = plain("flash_attention", TOKENS, dict(q="b s h d", k="b t g d", v="b t g e"))

FEATURES = DTYPES | {
    "bias": operand("bias", bias="h s t"),
    "bias of keys": operand("bias", bias="1 t"),
    "bias of queries": operand("bias", bias="s 1"),
    "bias of heads": operand("bias", bias="h 1 1"),
    "mask": operand("mask", mask=Operand("1 s t", chance(0.7))),
    "mask of keys": operand("mask", mask=Operand("1 t", chance(2.0))),
    "segments": operand("batch", q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments)),
    "packed": operand("batch", **TOKENS_PACKED),
    "packed, bounded": Feature("batch", operands=TOKENS_PACKED, options=dict(max_seqlen_q=S, max_seqlen_k=T)),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h n"),
    "dropout": Feature(operands=dict(dropout_key=Operand("", key)), options=dict(dropout_rate=0.3)),
    "causal": option(causal=True),
    "window": option("window", window=(40, 20)),
    "window of keys": option("window", window=64),
    "softcap": option(softcap=20.0),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
    "lse": option(return_lse=True),
    "deterministic": option(deterministic=True),
    "batch invariant": option(batch_invariant=True),
    "eight bits": option(precision="e4m3"),
    "one query": sized("queries", s=1),
    "one key": sized("keys", t=1),
    "no key": sized("keys", t=0),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=96),
}
