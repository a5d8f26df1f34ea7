"""flash_mla as an operation: from the public arguments to the operands and spec of the primitive."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ...errors import value_error
from ...primitives.flash_attention import FlashAttentionSpec
from ...primitives.flash_mla import Operands
from ...primitives.flash_mla import flash_mla as algorithm
from ...types import DropoutKey, LogitsBias, LogitsMask, Scale, Sinks, Window, visible_pairs
from .._operation import Prepared
from ._arguments import align, array, require_dtype, require_known, require_rank, require_same_dtype
from ._attention import attention_call, results_of
from .flash_attention import FlashAttention

NAME = algorithm.name


def flash_mla_arguments(
    q: Float[Array, "batch q_len heads head_dim"],
    kv_latent: Float[Array, "batch kv_len latent_dim"],
    k_rope: Float[Array, "batch kv_len rope_dim"],
    w_kc: Float[Array, "latent_dim heads nope_dim"],
    w_vc: Float[Array, "latent_dim heads v_head_dim"],
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Prepared[
    Float[Array, "batch q_len heads v_head_dim"]
    | tuple[Float[Array, "batch q_len heads v_head_dim"], Float[Array, "batch heads q_len"]]
]:
    """Multi-head latent attention for training and prefill: keys and values are projections of a latent per position.

    With c_j the latent of position j and r_j its rotary part, both shared by all heads, head h has

        k_jh = [Σ_r c_jr · w_kc[r, h], r_j],   v_jh = Σ_r c_jr · w_vc[r, h]

    and attends as in `flash_attention` with as many key/value heads as query heads, i' = i + K − S:

        s_ij = softmax_scale · q_i·k_j + bias_ij,   then softcap · tanh(s_ij / softcap),   then −∞ where masked
        lse_i = log(Σ_j exp s_ij + Σ_n exp sinks_n),   o_i = Σ_j exp(s_ij − lse_i) · keep_ij/(1 − dropout_rate) · v_j

    Keys and values are rounded to the dtype of q. Where it costs less, as with few queries, a forward in XLA, Triton or
    Mosaic GPU projects these in place of keys and values, to q w_kcᵀ and from o_latent to o_latent w_vc, and reads a
    latent once for all heads; the latter two need a causal call without bias, mask, segments, dropout or traced scale.
    Keys and values that would take more than 2 GiB are expanded for some heads at a time, in the gradient as well.
    Differentiable in q, kv_latent, k_rope, w_kc, w_vc, bias, sinks and a traced softmax_scale, through o and lse, to
    any order. `multi_latent_page_attention` decodes over pages of latents.

    Args:
        q: queries [B, S, H, Dn + Dr], first the features without rotary embedding, then those with it.
        kv_latent: latents [B, K, R].
        k_rope: rotary parts of the keys [B, K, Dr], with rotary embeddings applied, as in q.
        w_kc: the projection [R, H, Dn] of latents to keys.
        w_vc: the projection [R, H, V] of latents to values. All five have one float dtype.
        bias: floats added to the scaled logits; broadcastable to [B, H, S, K] in every axis.
        mask: bool, broadcastable to [B, H, S, K]; False hides.
        q_segment_ids: [B, S] integers; query i sees key j only if their ids are equal and not negative. They also
            separate packed sequences, as there are no cu_seqlens.
        kv_segment_ids: [B, K] integers.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        dropout_key: a `jax.random.key`; the dropped weights are those of `flash_attention` with that key.
        causal: query i sees keys j ≤ i'.
        window: (left, right): keys i' − left ≤ j ≤ i' + right, None is unbounded; an int w is (w − 1, 0).
        softcap: bound of the logits, from 2**-60 to the largest finite number of their dtype.
        softmax_scale: (Dn + Dr)**-0.5 by default; a number, or a traced scalar.
        dropout_rate: the fraction of the weights that is dropped, in [0, 1).
        return_lse: also return lse.
        deterministic: only implementations that give the same bits in every run.
        batch_invariant: only implementations that give a row the same bits whatever else is in the batch.

    Returns:
        o [B, S, H, V] in q's dtype, with lse [B, H, S] float32 if asked for. A query that sees nothing has o = 0 and
        lse = −∞ (with sinks, their logsumexp), and gradients 0.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    DeepSeek-V2, arXiv 2405.04434; FlashAttention-2, arXiv 2307.08691.
    """
    given = dict(q=q, kv_latent=kv_latent, k_rope=k_rope, w_kc=w_kc, w_vc=w_vc)
    given = {name: array(NAME, name, x) for name, x in given.items()}
    _check_arrays(**given)
    given |= {name: given[name][None] for name in ("w_kc", "w_vc")}
    rest = (bias, mask, q_segment_ids, kv_segment_ids, sinks, softmax_scale, dropout_key)
    attention, options = attention_call(
        NAME,
        Operands(*given.values(), *rest).shapes(given["q"].dtype),
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_rate=dropout_rate,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        precision=None,
    )
    finish = results_of(NAME, attention, return_lse)
    named = given | {name: x for name, x in attention._asdict().items() if name in Operands._fields and x is not None}
    return Prepared(align(algorithm.forward, named), FlashAttentionSpec(**options), finish)


def _check_arrays(q, kv_latent, k_rope, w_kc, w_vc) -> None:
    packed = "packed sequences are told apart by segment ids"
    require_rank(NAME, 4, f"batch, length, heads, features; {packed}", q=q)
    require_rank(NAME, 3, f"batch, length, features; {packed}", kv_latent=kv_latent, k_rope=k_rope)
    require_rank(NAME, 3, "features of a latent, heads, features of a head", w_kc=w_kc, w_vc=w_vc)
    shown = dict(q=q, kv_latent=kv_latent, k_rope=k_rope, w_kc=w_kc, w_vc=w_vc)
    require_dtype(NAME, np.floating, "a float type", **shown)
    require_same_dtype(NAME, **shown)
    for name, x in shown.items():
        if 0 in x.shape[1 if name in ("w_kc", "w_vc") else 2 :]:
            raise value_error(NAME, f"{name} has an axis of heads or features of size 0", **{name: x})
    (batch, _, heads, features), (_, length, latent) = q.shape, kv_latent.shape
    require_known(NAME, "the number of features of a latent", w_kc.shape[0], w_kc=w_kc)
    require_known(NAME, "the number of features of a value", w_vc.shape[2], w_vc=w_vc)
    sizes = (
        ("kv_latent", "batch", kv_latent.shape[0], "q", batch),
        ("k_rope", "batch", k_rope.shape[0], "q", batch),
        ("k_rope", "length", k_rope.shape[1], "kv_latent", length),
        ("w_kc", "latent features", w_kc.shape[0], "kv_latent", latent),
        ("w_vc", "latent features", w_vc.shape[0], "kv_latent", latent),
        ("w_kc", "heads", w_kc.shape[1], "q", heads),
        ("w_vc", "heads", w_vc.shape[1], "q", heads),
    )
    for name, of, found, other, wanted in sizes:
        if found != wanted:
            rule = f"{name} has {of} {found} but {other} has {wanted}; they must be equal"
            raise value_error(NAME, rule, **{n: shown[n] for n in (name, other)})
    if features != w_kc.shape[2] + k_rope.shape[2]:
        both = f"w_kc makes {w_kc.shape[2]} and k_rope has {k_rope.shape[2]}"
        raise value_error(NAME, f"q has {features} features but {both}; q must have as many as both", **shown)


class FlashMLA(FlashAttention):
    """Multi-head latent attention over latents or expanded keys and values: `ejkernel.lax.flash_mla` as an object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(flash_mla_arguments)
    renamed: ClassVar = {n: new for n, new in FlashAttention.renamed.items() if not n.startswith("cu_seqlens")}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with two heads of 128 + 64 features, and latents of 128."""
        shapes = dict(q=(1, 256, 2, 192), kv_latent=(1, 256, 128), k_rope=(1, 256, 64), w_kc=(128, 2, 128))
        shapes |= dict(w_vc=(128, 2, 128))
        made = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        return dict(made, causal=True, return_lse=True)

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """The flops of flash_attention on expanded keys and values, and 2 for each latent and number of a projection.

        Keys and values are expanded once in every pass, and again for each tangent or gradient of latents and weights.
        A forward has those of attention to latents, and of projections of queries and results, if these are fewer.
        """
        if not named.keys().isdisjoint(("mask", "q_segment_ids")):
            return None
        (batch, length, heads, d), (_, kv_len, latent) = named["q"].shape, named["kv_latent"].shape
        of = lambda name: f"{name}_dot" in named or f"{name}_bar" in results
        of_q, of_w_kc, of_w_vc, of_latent = (of(name) for name in ("q", "w_kc", "w_vc", "kv_latent"))
        of_k, of_v = of_latent or of_w_kc or of("k_rope"), of_latent or of_w_vc
        n, e = named["w_kc"].shape[-1], named["w_vc"].shape[-1]
        pairs = visible_pairs(length, kv_len, spec.causal, spec.window)
        features = d + e * ("o" in results) + d * (of_q + of_k) + e * (of_q or of_k) + e * of_v
        projected = n * (1 + of_latent + of_w_kc) + e * (1 + of_latent + of_w_vc)
        flops = pairs * features + kv_len * latent * projected
        if "o" in results:
            flops = min(flops, pairs * (d - n + 2 * latent) + length * latent * projected)
        return 2.0 * batch * heads * flops
