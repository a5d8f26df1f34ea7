"""flash_attention as an operation: from the public arguments to the operands and spec of the primitive, and back."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from ...ops.utils.operands import number_of, random_like
from ...primitives.flash_attention import FlashAttentionSpec, Operands
from ...primitives.flash_attention import flash_attention as algorithm
from ...types import (
    CuSeqlens,
    DropoutKey,
    LogitsBias,
    LogitsMask,
    Scale,
    Sinks,
    Window,
    visible_pairs,
)
from .._operation import Operation, Prepared
from ._arguments import align
from ._attention import attention_call, results_of
from ._dropout import dropout_words, key_of_seed

NAME = algorithm.name


def flash_attention_arguments(
    q: Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"],
    bias: LogitsBias | None = None,
    mask: LogitsMask | None = None,
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    sinks: Sinks | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    dropout_key: DropoutKey | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    dropout_rate: float = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    precision: Literal["e4m3"] | None = None,
) -> Prepared[
    Float[Array, "batch q_len q_heads v_head_dim"]
    | Float[Array, "q_tokens q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_len q_heads v_head_dim"], Float[Array, "batch q_heads q_len"]]
    | tuple[Float[Array, "q_tokens q_heads v_head_dim"], Float[Array, "q_heads q_tokens"]]
]:
    """Softmax attention, computed in tiles in memory linear in the sequence.

    With i' = i + K − S (bottom-right alignment), for query i and key j of one head:

        s_ij = softmax_scale · q_i·k_j + bias_ij,   then softcap · tanh(s_ij / softcap),   then −∞ where masked
        lse_i = log(Σ_j exp s_ij + Σ_n exp sinks_n),   o_i = Σ_j exp(s_ij − lse_i) · keep_ij/(1 − dropout_rate) · v_j

    Differentiable in q, k, v, bias, sinks and a traced softmax_scale, through o and lse, to any order. Logits of 16-bit
    arrays have to stay below 10⁹ on Hopper GPUs, where a row of larger ones may be NaN.

    Args:
        q: queries [B, S, H, D], or [T, H, D] with cu_seqlens.
        k: keys [B, K, G, D], or [T', G, D]; H is a multiple of G, and query head h uses head h // (H // G).
        v: values [B, K, G, V], or [T', G, V]; V may differ from D. q, k and v have one float dtype.
        bias: floats added to the scaled logits; broadcastable to [B, H, S, K] in every axis.
        mask: bool, broadcastable to [B, H, S, K]; False hides.
        q_segment_ids: [B, S] integers; query i sees key j only if their ids are equal and not negative.
        kv_segment_ids: [B, K] integers.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value; not scaled, not capped.
        cu_seqlens_q: [N + 1] integers, may be traced: sequence n is the tokens from entry n to entry n + 1.
        cu_seqlens_k: [N + 1] integers, likewise for keys and values.
        dropout_key: a `jax.random.key` of any implementation, may be traced. The kept set depends on all words of the
            key, b, h, i and j alone, also over Auto and Explicit axes. Inside a `jax.shard_map` of your own, b and h
            count from 0 on each device, so that all devices drop the same weights: fold `jax.lax.axis_index` of the
            axes that split batch and heads into the key.
        causal: query i sees keys j ≤ i'.
        window: (left, right): keys i' − left ≤ j ≤ i' + right, None is unbounded; an int w is the w keys that end
            with the query's own, (w − 1, 0). It may be larger than the lengths.
        softcap: bound of the logits, from 2**-60 to the largest finite number of their dtype.
        softmax_scale: D**-0.5 by default; a number of at most half of the largest float32, or a traced scalar.
        dropout_rate: the fraction of the weights that is dropped, in [0, 1).
        max_seqlen_q: static bound of the lengths in cu_seqlens_q.
        max_seqlen_k: static bound of the lengths in cu_seqlens_k.
        return_lse: also return lse.
        deterministic: only implementations that give the same bits in every run.
        batch_invariant: only implementations that give a row the same bits whatever else is in the batch.
        precision: "e4m3" allows the forward to round q, k, v and the weights to eight bits, with a scale for each tile,
            on devices whose matrix products are faster in e4m3; q and k are multiplied by a Hadamard matrix first,
            which spreads outliers. For normal random numbers the relative error of o is then 5e-2 (bfloat16: 2e-3).
            Other devices, gradients and tangents compute as without it.

    Returns:
        o [B, S, H, V] in q's dtype, with lse [B, H, S] float32 if asked for; packed: [T, H, V] and [H, T]. A query that
        sees nothing has o = 0 and lse = −∞ (with sinks, their logsumexp), and gradients 0.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    FlashAttention-2, arXiv 2307.08691; FlashAttention-3, arXiv 2407.08608.
    """
    operands, options = attention_call(
        NAME,
        Operands(
            q,
            k,
            v,
            bias,
            mask,
            q_segment_ids,
            kv_segment_ids,
            sinks,
            softmax_scale,
            cu_seqlens_q,
            cu_seqlens_k,
            dropout_key,
        ),
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_rate=dropout_rate,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        precision=precision,
    )
    finish = results_of(NAME, operands, return_lse)
    named = align(algorithm.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, FlashAttentionSpec(**options), finish)


class FlashAttention(Operation):
    """Softmax attention in tiles, never a whole row of weights: `ejkernel.lax.flash_attention` as a kernel object."""

    algorithm = algorithm
    prepare_arguments = staticmethod(flash_attention_arguments)
    renamed: ClassVar = {
        "softcap": "logits_soft_cap",
        "window": "sliding_window",
        "sinks": "softmax_aux",
        "dropout_rate": "dropout_prob",
        "dropout_key": "dropout_seed",
        "cu_seqlens_q": "cum_seqlens_q",
        "cu_seqlens_k": "cum_seqlens_k",
    }
    retyped: ClassVar = {"dropout_key": int | Integer[Array, ""] | None}

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with enough queries and keys to fill the tiles of every implementation."""
        x, kv = (jax.ShapeDtypeStruct((1, 256, heads, 128), jnp.bfloat16) for heads in (2, 1))
        return dict(q=x, k=kv, v=kv, causal=True, return_lse=True)

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; uneven sequences and segments; a mask that hides a tenth; the usual scale."""
        values = random_like(dict(operands))
        for name, x in operands.items():
            if name.startswith("cu_seqlens"):
                tokens = operands["q" if name.endswith("q") else "k"].shape[1]
                ends = tokens * np.linspace(0, 1, x.shape[1]) ** 1.5
                values[name] = jnp.broadcast_to(jnp.asarray(np.round(ends), jnp.int32), x.shape)
            elif name.endswith("segment_ids"):
                values[name] = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32) * 4 // x.shape[1], x.shape)
            elif name == "mask":
                values[name] = jax.random.bernoulli(jax.random.key(0), 0.9, x.shape)
            elif name == "softmax_scale":
                values[name] = jnp.full(x.shape, operands["q"].shape[-1] ** -0.5, x.dtype)
            elif name == "dropout":
                values[name] = dropout_words(cls.algorithm.name, spec.dropout_rate, jax.random.key(0), values["q"])
        return values

    @classmethod
    def flops(cls, named: Mapping[str, Any], results: Sequence[str], spec: Any) -> float | None:
        """2 for each visible pair and each feature of a product; None if values decide which pairs are visible.

        The products are s = q·kᵀ; in the forward p·v; one for each tangent or gradient of q, k and v; and, if q or k is
        among these, do·vᵀ (or ṡ·v).
        """
        if not named.keys().isdisjoint(("mask", "q_segment_ids", "cu_seqlens_q")):
            return None
        (batch, length, heads, d), e = named["q"].shape, named["v"].shape[-1]
        of_q, of_k, of_v = (f"{name}_dot" in named or f"{name}_bar" in results for name in "qkv")
        pairs = visible_pairs(length, named["k"].shape[1], spec.causal, spec.window)
        features = d + e * ("o" in results) + d * (of_q + of_k) + e * (of_q or of_k) + e * of_v
        return 2.0 * batch * heads * pairs * features

    @classmethod
    def convert(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the lax API, with a dropout key from the integer seed of the modules API, by default 0."""
        seed, rate = arguments.get("dropout_key"), number_of(arguments.get("dropout_rate"))
        if seed is None and not (isinstance(rate, float | np.floating) and rate > 0):
            return dict(arguments)
        return dict(arguments, dropout_key=key_of_seed(cls.algorithm.name, 0 if seed is None else seed))

    @classmethod
    def place(
        cls, arrays: Mapping[str, Any], given: Mapping[str, Any], specs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shards drop the same weights as the whole call: each gets its rows of the whole call's dropout counters."""
        rate = given.get("dropout_rate", 0.0)
        if not rate:
            return dict(arrays), dict(specs)
        spec = (*specs["q"], None, None, None)
        rows = dropout_words(cls.algorithm.name, rate, given.get("dropout_key"), arrays["q"])
        return dict(arrays, dropout_key=rows), dict(specs, dropout_key=PartitionSpec(spec[0], spec[2]))
