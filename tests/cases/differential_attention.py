"""Calls of differential_attention. With b = h = 4 and g = 2, eight devices can split the batch by 4, the heads by 2."""

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.flash_attention import reference
from ejkernel.modules import FlashAttention

from ._case import Case, Operand
from ._feature import DTYPES, TOKENS, Feature, S, T, operand, option, plain, sized
from .flash_attention import lengths, peaks, scalar, segments

SIZES = dict(b=4, s=8, t=12, h=4, g=2, d=8, e=16)
TINY = dict(b=1, s=2, t=3, h=2, g=1, d=2, e=2)
ARRAYS = dict(q1="b s h d", k1="b t g d", q2="b s h d", k2="b t g d", v="b t g e", lambda_="h")
PACKED = dict(q1="s h d", k1="t g d", q2="s h d", k2="t g d", v="t g e", lambda_="")


def formula(q1, k1, q2, k2, v, lambda_, **how):
    """o = softmax(q1·k1ᵀ)·v − λ · softmax(q2·k2ᵀ)·v by the formula of attention, whose results are in float32."""

    def attention(q, k):
        call = FlashAttention.prepare_arguments(q, k, v, **how)
        found = reference(*FlashAttention.algorithm.operands(**call.named), spec=call.spec)
        return call.finish(found._asdict()).astype(np.promote_types(q.dtype, np.float32))

    first, second = attention(q1, k1), attention(q2, k2)
    factor = jnp.reshape(lambda_, (1,) * (q1.ndim - 2) + (-1, 1)).astype(first.dtype)
    return (first - factor * second).astype(q1.dtype)


def case(name, sizes=(), operands=(), of=ARRAYS, tiny=None, **options):
    return Case(
        "differential_attention",
        name,
        {**SIZES, **dict(sizes)},
        {**of, **dict(operands)},
        ("s h e" if of is PACKED else "b s h e",),
        options,
        tiny=tiny,
        composed_formula=formula,
        composed_split=("h", "g") if of is PACKED else ("b", "h", "g"),
    )


CASES = (
    case("causal", causal=True, tiny=TINY),
    case(
        "window_softcap_traced_scale",
        dict(s=12),
        dict(softmax_scale=Operand("", scalar, sums=2)),  # of each of the two attentions
        window=(4, 2),
        softcap=2.0,
    ),
    case(
        "segments",
        dict(t=8),
        dict(q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments)),
        causal=True,
    ),
    case(
        "packed",
        dict(s=20, t=24, m=5),
        dict(cu_seqlens_q=Operand("m", lengths(20)), cu_seqlens_k=Operand("m", lengths(24))),
        of=PACKED,
        causal=True,
        window=(6, 0),
    ),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, sizes=(), **values):
    """λ is that of the first layers of the paper, 0.2 and more."""
    operands = {n: Operand(ARRAYS[n], make) for n, make in values.items()} | dict(lambda_=Operand("", scalar))
    return case(name, {**dict(b=2, s=24, t=40, d=16, e=32), **dict(sizes)}, operands, causal=True)


large = lambda rng, shape: 30 * rng.standard_normal(shape)
small = lambda rng, shape: 1e-3 * rng.standard_normal(shape)

FAMILIES = (
    family("normal"),
    family("large_logits", q1=large, q2=large),
    family("one_hot_peaks", q1=peaks, k1=peaks, q2=peaks, k2=peaks),
    family("long_uniform_rows", dict(s=8, t=512), q1=small, q2=small),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

TOKENS_PACKED = PACKED | dict(lambda_="h", cu_seqlens_q=Operand("m", lengths(S)), cu_seqlens_k=Operand("m", lengths(T)))
PLAIN = plain("differential_attention", TOKENS, ARRAYS)

FEATURES = DTYPES | {
    "one factor": operand(lambda_=Operand("", scalar)),
    "segments": operand("batch", q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments)),
    "packed": operand("batch", **TOKENS_PACKED),
    "packed, bounded": Feature("batch", operands=TOKENS_PACKED, options=dict(max_seqlen_q=S, max_seqlen_k=T)),
    # No implementation takes packed sequences with it.
    "batch invariant": option("batch", batch_invariant=True),
    "causal": option(causal=True),
    "window": option("window", window=(40, 20)),
    "softcap": option(softcap=20.0),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
    "deterministic": option(deterministic=True),
    "one query": sized("queries", s=1),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=96),
}
