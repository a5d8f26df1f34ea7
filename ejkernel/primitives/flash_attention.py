"""flash_attention: softmax(scale·q·kᵀ + bias, masked)·v and the logsumexp of its rows.

The primitive computes what the public operation does, but every array has a batch axis (of size 1 if it does not vary),
so that one table of axes determines how to check shapes, fold a mapped axis, and shard:

    b batch · s queries · t keys · h query heads · g key/value heads · d query/key features · e value features

`b? h? …` may have size 1 and is then broadcast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import ShortRepr
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,s,h,d], k [b,t,g,d], v [b,t,g,e] of one dtype; bias and mask [b?,h?,s?,t?]; segment ids [b,s] and [b,t] int32;
    sinks [b?,h,n] float32; softmax_scale [b?,h?] float32 (only when traced: a static scale is in the spec);
    cu_seqlens [b?,n+1] int32; dropout [b,h,8] uint32: the two words of the key, then the batch and head index, which
    with the places of query and key are the counter of Philox; query n is at place word 4 + n · word 5, and keys are by
    words 6 and 7. They are an array so that folding and sharding of the batch and head axes, and calls for a part of
    the queries and keys, do not change which weights are kept.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    sinks: Any = None
    softmax_scale: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    dropout: Any = None


class Outputs(NamedTuple):
    """o [b,s,h,e] in q's dtype, lse [b,h,s] float32."""

    o: Any
    lse: Any


@dataclass(frozen=True, repr=False)
class FlashAttentionSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        causal: query i sees keys j ≤ i + K − S (bottom-right aligned).
        window: (left, right), both inclusive and None where unbounded: i' − left ≤ j ≤ i' + right with i' = i + K − S.
        softcap: logits become softcap·tanh(logits / softcap).
        softmax_scale: the static scale of q·kᵀ; 1.0 when the scale is an operand.
        dropout_rate: the share of weights dropped; kept ones are divided by 1 − rate.
        max_seqlen_q: static bound of the lengths in cu_seqlens_q, None if not given.
        max_seqlen_k: static bound of the lengths in cu_seqlens_k, None if not given.
        deterministic: allow only implementations and configs whose results repeat bit for bit.
        batch_invariant: allow only those by which the bits of a row's result do not depend on the rest of the batch.
        precision: the dtype to which operands of products in the forward may be rounded: None (their own) or "e4m3".
        split: the keys are one split of those that a query sees. The o and lse that a tangent or backward is given are
            those of all splits merged; with p = exp(s − lse) of the split's keys, its results are the terms of these
            keys in sums over all. The forward is of the split alone.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    softmax_scale: float = 1.0
    dropout_rate: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    precision: str | None = None
    split: bool = False


TABLE = {
    "q": axes("b s h d"),
    "k": axes("b t g d"),
    "v": axes("b t g e"),
    "bias": axes("b? h? s? t?"),
    "mask": axes("b? h? s? t?"),
    "q_segment_ids": axes("b s"),
    "kv_segment_ids": axes("b t"),
    "sinks": axes("b? h n"),
    "softmax_scale": axes("b? h?"),
    "cu_seqlens_q": axes("b? m"),
    "cu_seqlens_k": axes("b? m"),
    "dropout": axes("b h 8"),
    "o": axes("b s h e"),
    "lse": axes("b h s"),
}


def dtypes_of_outputs(dtypes: Mapping[str, Any], spec: FlashAttentionSpec) -> dict[str, Any]:
    """The dtypes of the outputs: o has that of q, lse that of statistics."""
    del spec
    return {"o": dtypes["q"], "lse": np.promote_types(dtypes["q"], np.float32)}


flash_attention = Trio(
    "flash_attention",
    Operands,
    Outputs,
    TABLE,
    differentiable=("q", "k", "v", "bias", "sinks", "softmax_scale"),
    dtypes=dtypes_of_outputs,
    layout=Layout(advice="shard the sequence by ejkernel.lax.ring_attention, inside jax.shard_map"),
    linear=[("v",)],
)
