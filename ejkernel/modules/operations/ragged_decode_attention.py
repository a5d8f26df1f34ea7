"""ragged_decode_attention as an operation: from public arguments to operands and spec of the primitive, and back."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ...errors import value_error
from ...ops.utils.operands import random_like
from ...primitives.ragged_decode_attention import Operands
from ...primitives.ragged_decode_attention import ragged_decode_attention as primitives
from ...types import Sinks, Window
from ...types.ragged_decode_attention import RaggedDecodeAttentionConfig
from .._operation import Operation, Prepared
from ._arguments import align, array, int32, require_dtype, require_rank, require_same_dtype, static_bool
from ._attention import sinks_of_heads
from ._pages import RENAMED, cache_spec, check_cache, check_heads

NAME = primitives.name


def ragged_decode_attention_arguments(
    q: Float[Array, "batch q_heads head_dim"],
    k: Float[Array, "batch kv_len kv_heads head_dim"],
    v: Float[Array, "batch kv_len kv_heads v_head_dim"],
    sequence_start: Integer[Array, " batch"],
    sequence_end: Integer[Array, " batch"],
    sinks: Sinks | None = None,
    *,
    window: Window | None = None,
    softcap: float | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
) -> Prepared[
    Float[Array, "batch q_heads v_head_dim"]
    | tuple[Float[Array, "batch q_heads v_head_dim"], Float[Array, "batch q_heads"]]
]:
    """A step of decoding over a dense cache: one query of each sequence attends over a part of the sequence's keys.

    The query of sequence n is at position sequence_end[n] − 1 and sees sequence_start[n] ≤ j < sequence_end[n], within
    the window:

        s_j = softmax_scale · q·k_j,   then softcap · tanh(s_j / softcap)
        lse = log(Σ_j exp s_j + Σ_x exp sinks_x),   o = Σ_j exp(s_j − lse) · v_j

    Forward only: it has no derivative. Keys and values that no query sees may hold anything, even NaN. A query that
    sees no key has o = 0, and lse = −∞ or that of the sinks.

    Args:
        q: one query of each sequence [B, H, D], of a float dtype.
        k: the keys [B, K, G, D], in q's dtype; H is a multiple of G, and query head h uses head h // (H // G).
        v: the values [B, K, G, V], in q's dtype.
        sequence_start: [B] integers: the first key of each sequence, which may follow padding on the left.
        sequence_end: [B] integers: the index after its last key; values above K mean K.
        sinks: [H] or [H, n] float logits that join the denominator of every row, with no value.
        window: an int w, the w keys that end with the query's own, or a pair (left, right), where right has no effect.
        softcap: bound of the logits.
        softmax_scale: D**-0.5 by default; a static number.
        num_splits: the number of parts of a sequence's keys that are computed in parallel, if the implementation is not
            to choose it; at most the number of keys. It changes only the rounding.
        return_lse: also return lse.

    Returns:
        o [B, H, V] in q's dtype; with return_lse (o, lse [B, H] float32).

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit; the message names operand, numbers and rule.
        NotImplementedError: a derivative is asked for.
        UnsupportedError: no implementation on the target takes this call; the message lists the reasons.

    Flash-Decoding, 2023, the blog of PyTorch; grouped queries, arXiv 2305.13245; sinks, arXiv 2309.17453.
    """
    q, k, v = (array(NAME, name, x) for name, x in dict(q=q, k=k, v=v).items())
    ends = dict(sequence_start=sequence_start, sequence_end=sequence_end)
    ends = {name: array(NAME, name, x) for name, x in ends.items()}
    _check_arrays(q, k, v)
    require_rank(NAME, 1, "batch", **ends)
    require_dtype(NAME, np.integer, "an integer type", **ends)
    for name, x in ends.items():
        if x.shape[0] != q.shape[0]:
            raise value_error(NAME, f"{name} must be [{q.shape[0]}], one number a sequence", q=q, **{name: x})
    operands = Operands(
        q, k, v, **{name: int32(x) for name, x in ends.items()}, sinks=sinks_of_heads(NAME, sinks, q.shape[1], q)
    )
    spec = cache_spec(NAME, q, window, softcap, softmax_scale, num_splits, k.shape[1])
    return_lse = static_bool(NAME, "return_lse", return_lse)
    named = align(primitives.forward, {name: x for name, x in operands._asdict().items() if x is not None})
    return Prepared(named, spec, lambda out: (out["o"], out["lse"]) if return_lse else out["o"])


def _check_arrays(q, k, v) -> None:
    require_rank(NAME, 3, "batch, heads, features", q=q)
    require_rank(NAME, 4, "batch, keys, heads, features", k=k, v=v)
    check_cache(NAME, q, k=k, v=v)
    require_same_dtype(NAME, q=q, k=k, v=v)
    if k.shape[0] != q.shape[0]:
        raise value_error(NAME, f"k has {k.shape[0]} sequences but q has {q.shape[0]}; they must be equal", q=q, k=k)
    check_heads(NAME, q, "k", k, groups=k.shape[2], features=k.shape[3])
    if v.shape[:3] != k.shape[:3]:
        raise value_error(NAME, f"v must be {list(k.shape[:3])} of features, as k is", k=k, v=v)


class RaggedDecodeAttention(Operation):
    """A step of decoding over a dense cache: `ejkernel.lax.ragged_decode_attention` as a kernel object."""

    algorithm = primitives
    config_class = RaggedDecodeAttentionConfig
    prepare_arguments = staticmethod(ragged_decode_attention_arguments)
    renamed: ClassVar = RENAMED

    @classmethod
    def example(cls) -> dict[str, Any]:
        """A call with three sequences of up to 128 keys."""
        array = jax.ShapeDtypeStruct
        q, kv = array((3, 4, 128), jnp.bfloat16), array((3, 128, 2, 128), jnp.bfloat16)
        return dict(q=q, k=kv, v=kv, **{name: array((3,), jnp.int32) for name in ("sequence_start", "sequence_end")})

    @classmethod
    def synthetic_operands(cls, operands: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Random arrays; each sequence has the first three quarters of its keys."""
        batch, length = operands["k"].shape[:2]
        ends = dict(sequence_start=0, sequence_end=max(1, 3 * length // 4))
        return random_like(dict(operands)) | {name: jnp.full((batch,), x, jnp.int32) for name, x in ends.items()}
