"""differential_attention: the difference of two softmax attentions, composed of two calls of flash_attention."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ...errors import type_error, value_error
from ...primitives._axes import axes
from ...primitives._empty import is_inside_shard_map
from ...primitives._sharding import aligned
from ...primitives.flash_attention import Operands
from ...primitives.flash_attention import flash_attention as algorithm
from ...types import ConfigLike, CuSeqlens, Scale, Window
from .._argument_names import renaming
from .._composed import composed
from ._arguments import array, require_dtype, static_number, vary_alike
from ._attention import attention_call
from ._configs import config_of_parts
from .flash_attention import FlashAttention

NAME = "differential_attention"

Queries: TypeAlias = Float[Array, "batch q_len q_heads head_dim"] | Float[Array, "q_tokens q_heads head_dim"]
Keys: TypeAlias = Float[Array, "batch kv_len kv_heads head_dim"] | Float[Array, "kv_tokens kv_heads head_dim"]
Values: TypeAlias = Float[Array, "batch kv_len kv_heads v_head_dim"] | Float[Array, "kv_tokens kv_heads v_head_dim"]
Output: TypeAlias = Float[Array, "batch q_len q_heads v_head_dim"] | Float[Array, "q_tokens q_heads v_head_dim"]


@composed
def differential_attention(
    q1: Queries,
    k1: Keys,
    q2: Queries,
    k2: Keys,
    v: Values,
    lambda_: float | Float[Array, ""] | Float[Array, " q_heads"],
    q_segment_ids: Integer[Array, "batch q_len"] | None = None,
    kv_segment_ids: Integer[Array, "batch kv_len"] | None = None,
    cu_seqlens_q: CuSeqlens | None = None,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: Scale | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    config: ConfigLike | None = None,
) -> Output:
    """The attention of the Differential Transformer: the difference of two softmax attentions over the same values.

        o = attention(q1, k1, v) − λ · attention(q2, k2, v)

    Each attention is a call of flash_attention, rounded to the dtype of q1 before the difference, which is computed in
    float32, or in float64 for float64 arrays. One call with twice the heads would have to copy queries, keys and values
    side by side, which takes longer than it saves.

    In the paper λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ_init, and o of each head is normalised to RMSNorm(o) ·
    (1 − λ_init). Both are left to the caller. Differentiable in all six arrays and a traced softmax_scale, to any
    order.

    Args:
        q1: queries of the first attention [B, S, H, D], or [T, H, D] with cu_seqlens.
        k1: its keys [B, K, G, D], or [T', G, D]; H is a multiple of G, and query head h uses head h // (H // G).
        q2: queries of the second attention, as q1.
        k2: its keys, as k1.
        v: values of both [B, K, G, V], or [T', G, V]; in the paper V = 2·D. All five have one float dtype.
        lambda_: λ, a number, or an array [] or [H] of a float dtype, which may be traced.
        q_segment_ids: [B, S] integers, as in flash_attention.
        kv_segment_ids: [B, K] integers.
        cu_seqlens_q: [N + 1] integers, may be traced, as in flash_attention.
        cu_seqlens_k: [N + 1] integers, likewise for keys and values.
        causal: as in flash_attention.
        window: as in flash_attention.
        softcap: as in flash_attention.
        softmax_scale: D**-0.5 by default; as in flash_attention.
        max_seqlen_q: static bound of the lengths in cu_seqlens_q.
        max_seqlen_k: static bound of the lengths in cu_seqlens_k.
        deterministic: as in flash_attention.
        batch_invariant: as in flash_attention.
        config: the config of the call of flash_attention.

    Returns:
        o [B, S, H, V], or packed [T, H, V], in q1's dtype; 0 for queries that see no key.

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Differential Transformer, arXiv 2410.05258.
    """
    options = dict(
        causal=causal,
        window=window,
        softcap=softcap,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    visible = dict(
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
    )
    given = dict(q1=q1, k1=k1, q2=q2, k2=k2, v=v)
    q1, k1, q2, k2, v = (array(NAME, name, x) for name, x in given.items())
    _check(Operands(q1, k1, v, **visible), options)
    _check_alike(q1=q1, q2=q2)
    _check_alike(k1=k1, k2=k2)
    arrays = dict(q1=q1, k1=k1, q2=q2, k2=k2, v=v, lambda_=_factor(lambda_, q1))
    q1, k1, q2, k2, v, lambda_ = _aligned(arrays).values()
    options["config"] = config_of_parts(NAME, config, FlashAttention.config_class)
    first, second = (
        FlashAttention.call(q, k, v, **visible, **options).astype(lambda_.dtype) for q, k in ((q1, k1), (q2, k2))
    )
    lambda_ = lambda_.reshape((1,) * (q1.ndim - 2) + (-1, 1)) if lambda_.ndim else lambda_
    if not first.size and is_inside_shard_map():  # a constant, so that no gradient needs its cotangent
        return jnp.zeros_like(first, q1.dtype)
    return (first - lambda_ * second).astype(q1.dtype)


def _check(given: Operands, options: Mapping[str, Any]) -> None:
    """Raises if the first attention is not a valid call of flash_attention; computes nothing."""

    def check() -> None:
        attention_call(NAME, given, **options, dropout_rate=0.0, precision=None)

    with renaming(dict(q="q1", k="k1")):
        jax.eval_shape(check)


def _check_alike(**arrays: Any) -> None:
    (first, a), (second, b) = arrays.items()
    if a.dtype != b.dtype:
        raise type_error(NAME, f"{second} is {b.dtype} but {first} is {a.dtype}; they must be equal", **arrays)
    if a.shape != b.shape:
        raise value_error(NAME, f"{second} must have the shape of {first}", **arrays)


def _aligned(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with one sharding for each axis name, as flash_attention needs its operands."""
    of_all = dict(q1="b s h d", k1="b t g d", q2="b s h d", k2="b t g d", v="b t g e", lambda_="h")
    table = {name: axes(of_all[name])[-x.ndim :] if x.ndim else () for name, x in arrays.items()}
    return aligned(NAME, table, algorithm.forward.layout, vary_alike(arrays))


def _factor(lambda_: Any, q1: Array) -> Array:
    """λ in the dtype in which the difference is computed."""
    dtype = np.promote_types(q1.dtype, np.float32)
    if isinstance(lambda_, float | int) and not isinstance(lambda_, bool):
        number = static_number(NAME, "lambda_", lambda_)
        if not abs(number) <= float(np.finfo(dtype).max):
            raise value_error(NAME, f"lambda_ is {number}; it must be finite, and a number of {dtype}")
        return jnp.asarray(number, dtype)
    lambda_ = array(NAME, "lambda_", lambda_)
    require_dtype(NAME, np.floating, "a float type", lambda_=lambda_)
    if lambda_.shape not in ((), (q1.shape[-2],)):
        raise value_error(NAME, "lambda_ must be a scalar or one number of each query head", lambda_=lambda_, q1=q1)
    return lambda_.astype(dtype)
