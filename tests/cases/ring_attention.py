"""Calls of ring_attention over two or three devices, whose arrays are in the order in which they are sharded.

As the tokens are multiples of the devices and b = 4, eight devices can split the batch by four, the tokens by two. The
letter c is the columns of bias and mask: the keys of all devices, which each device has.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ._case import Case, Operand
from ._feature import DTYPES, Feature, operand, option, plain, sized
from ._over import Over
from .flash_attention import chance, key, peaks, scalar, segments

SIZES = dict(b=4, s=8, t=8, c=8, h=4, g=2, d=8, e=8)
TINY = dict(b=1, s=4, t=4, h=2, g=1, d=2, e=2)
QKV = dict(q="b s h d", k="b t g d", v="b t g e")
# Beside Auto axes all are made of permutes.
KINDS = dict(
    ring=("collective-permute",),
    all_gather=("all-gather", "reduce-scatter", "collective-permute"),
    ulysses=("all-to-all", "all-gather", "collective-permute"),
)


def over(devices=2, strategy="ring"):
    return Over(dict(s="y", t="y"), dict(y=devices), KINDS[strategy])


def positions(layout, length, size):
    """The positions in the sequence of the tokens of all devices, one device after the other."""
    device, place = np.arange(size)[:, None], np.arange(length // size)
    if layout == "striped":
        return (device + size * place).ravel()
    if layout == "contiguous" or size == 1:
        return np.arange(length)
    half = length // size // 2
    return np.hstack([device * half + place[:half], (2 * size - 1 - device) * half + place[:half]]).ravel()


def visible(q, k, axis_sizes, axis_name, layout, causal, window, q_segment_ids, kv_segment_ids, mask):
    """Whether a query sees a key: the positions of the whole sequence, its last query aligned with its last key."""
    lengths, size = (q.shape[1], k.shape[1]), axis_sizes[axis_name]
    i, j = (positions(layout, length, size) for length in lengths)
    distance = j - (i[:, None] + lengths[1] - lengths[0])
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    seen = np.ones_like(distance, bool)
    for bound, along in ((left, -distance), (right, distance), (0 if causal else None, distance)):
        seen &= True if bound is None else along <= bound
    seen = jnp.asarray(seen)[None, None]
    if q_segment_ids is not None:
        a, b = q_segment_ids[:, None, :, None], kv_segment_ids[:, None, None, :]
        seen = seen & (a == b) & (a >= 0)
    return seen if mask is None else seen & of_four_axes(mask)


def of_four_axes(x):
    """x with the four axes [b,h,s,t], as JAX may be set not to promote ranks."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def formula(
    q,
    k,
    v,
    bias=None,
    mask=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    sinks=None,
    softmax_scale=None,
    *,
    axis_sizes,
    axis_name,
    layout,
    strategy,
    causal=False,
    window=None,
    softcap=None,
    return_lse=False,
):
    """softmax(scale·q·kᵀ + bias, masked)·v and the logsumexp of its rows, for all devices at once."""
    del strategy  # none of them changes the result
    wide = np.promote_types(q.dtype, np.float32)
    ids = q_segment_ids, kv_segment_ids
    seen = visible(q, k, axis_sizes, axis_name, layout, causal, window, *ids, mask)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scale = jnp.asarray(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, wide)
    s = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest", preferred_element_type=wide) * scale
    s = s if bias is None else s + of_four_axes(bias.astype(wide))
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(seen, s, -jnp.inf)
    if sinks is not None:
        logits = jnp.broadcast_to(sinks.astype(wide).reshape(1, q.shape[2], 1, -1), (*s.shape[:3], sinks[0].size))
        s = jnp.concatenate([s, logits], -1)
    top = s.max(-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    total, empty = jnp.where(total == 0, 1, total), total == 0
    p = (weights / total)[..., : k.shape[1]].astype(q.dtype)
    o = jnp.einsum("bhst,bthe->bshe", p, v, precision="highest", preferred_element_type=wide).astype(q.dtype)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]
    return (o, lse) if return_lse else o


def case(name, strategy, layout, sizes=(), operands=(), devices=2, **more):
    """A case; `options` may also have its tiny sizes."""
    tiny, results = more.pop("tiny", None), ("b s h e", "b h s")
    return Case(
        "ring_attention",
        name,
        {**SIZES, **dict(sizes)},
        {**QKV, **dict(operands)},
        results,
        dict(axis_name="y", layout=layout, strategy=strategy, return_lse=True, **more),
        local=False,
        tiny=tiny,
        composed_formula=formula,
        composed_split=("b",),
        over=over(devices, strategy),
    )


some = lambda rng, shape: rng.random(shape) < 0.7
IDS = dict(q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments))

CASES = (
    case("ring_zigzag_causal", "ring", "zigzag", causal=True, tiny=TINY),
    case("ring_striped_segments", "ring", "striped", dict(b=2, s=6, t=6), {**IDS, "sinks": "h"}, 3, causal=True),
    case(
        "ring_contiguous_bias_mask",
        "ring",
        "contiguous",
        dict(b=2),
        dict(bias=Operand("h s c", sums=2), mask=Operand("b 1 s c", chance(0.7))),  # of the columns of each hop
    ),
    case(
        "ring_cross_traced_scale", "ring", "zigzag", dict(b=2, t=12), dict(softmax_scale=Operand("", scalar)), window=9
    ),
    case(
        "gathered_zigzag_window",
        "all_gather",
        "zigzag",
        dict(b=2, n=2),
        dict(sinks=Operand("h n", sums=2)),  # of either half of the queries
        window=(4, 2),
        softcap=2.0,
        tiny=dict(TINY, n=2),
    ),
    # Without softcap the second derivative of a bias that all keys of a query share would be 0.
    case(
        "gathered_striped",
        "all_gather",
        "striped",
        dict(b=2, t=12, c=12),
        dict(bias="s 1", mask=Operand("1 c", some)),
        softcap=2.0,
    ),
    case("exchanged_zigzag_segments", "ulysses", "zigzag", dict(b=2, n=2), {**IDS, "sinks": "h n"}, causal=True),
)

# --- For the tests of precision ---------------------------------------------------------------------------------------


def family(name, sizes=(), **values):
    operands = {n: Operand(QKV[n], make) for n, make in values.items()}
    return case(name, "ring", "zigzag", {**dict(b=2, s=24, t=40, d=16, e=16), **dict(sizes)}, operands, causal=True)


FAMILIES = (
    family("normal"),
    family("large_logits", q=lambda rng, shape: 30 * rng.standard_normal(shape)),
    family("one_hot_peaks", q=peaks, k=peaks),
    family("long_uniform_rows", dict(s=8, t=512), q=lambda rng, shape: 1e-3 * rng.standard_normal(shape)),
)

# --- For the tests of pairs of features -------------------------------------------------------------------------------

TOKENS = dict(b=2, s=200, t=260, c=260, h=4, g=2, d=64, e=64, n=3)
OPTIONS = dict(axis_name="y", layout="zigzag", strategy="ring", return_lse=True)
PLAIN = replace(plain("ring_attention", TOKENS, QKV, **OPTIONS), results=("b s h e", "b h s"), over=over())
TESTED_ELSEWHERE = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

FEATURES = DTYPES | {
    "bias": operand("bias", bias="h s c"),
    "bias of keys": operand("bias", bias="1 c"),
    "bias of queries": operand("bias", bias="s 1"),
    "mask": operand("mask", mask=Operand("1 s c", chance(0.7))),
    "mask of keys": operand("mask", mask=Operand("1 c", some)),
    "segments": operand(**IDS),
    "sinks": operand("sinks", sinks="h"),
    "several sinks": operand("sinks", sinks="h n"),
    "dropout": Feature(operands=dict(dropout_key=Operand("", key)), options=dict(dropout_rate=0.3)),
    "striped": option("layout", layout="striped"),
    "contiguous": option("layout", layout="contiguous"),
    "gathered": option("strategy", strategy="all_gather"),
    "exchanged": option("strategy", strategy="ulysses"),
    "chosen": option("strategy", strategy="auto"),
    "causal": option(causal=True),
    "window": option("window", window=(40, 20)),
    "window of keys": option("window", window=64),
    "softcap": option(softcap=20.0),
    "scale": option("scale", softmax_scale=0.3),
    "traced scale": operand("scale", softmax_scale=Operand("", scalar)),
    "deterministic": option(deterministic=True),
    "batch invariant": option(batch_invariant=True),
    "eight bits": option(precision="e4m3"),
    "four queries": sized("queries", s=4),
    "four keys": sized("keys", t=4, c=4),
    "one head": sized("heads", h=1, g=1),
    "wide values": sized("values", e=96),
}
