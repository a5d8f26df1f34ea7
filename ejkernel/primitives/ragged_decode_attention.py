"""ragged_decode_attention: one query of each sequence attends over a range of the sequence's keys in a dense cache.

b batch of sequences · h query heads · g key/value heads · t keys · d features of keys · e features of values
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,h,d], k [b,t,g,d] and v [b,t,g,e] of one dtype; sequence_start [b] and sequence_end [b] int32; sinks [b?,h,x]
    float32.
    """

    q: Any
    k: Any
    v: Any
    sequence_start: Any
    sequence_end: Any
    sinks: Any = None


class Outputs(NamedTuple):
    """o [b,h,e] in q's dtype, lse [b,h] float32."""

    o: Any
    lse: Any


ragged_decode_attention = ForwardOnly(
    "ragged_decode_attention",
    Operands,
    Outputs,
    {
        "q": axes("b h d"),
        "k": axes("b t g d"),
        "v": axes("b t g e"),
        "sequence_start": axes("b"),
        "sequence_end": axes("b"),
        "sinks": axes("b? h x"),
        "o": axes("b h e"),
        "lse": axes("b h"),
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(advice="shard the batch or the heads, or merge shards of the keys by merge_attention_shards"),
)
