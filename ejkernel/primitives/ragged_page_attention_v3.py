"""ragged_page_attention_v3: writes a step's keys and values into a paged cache, and attends over the cache.

    b batch · t tokens of the step · h query heads · g key/value heads · d features · n sequences · m = n + 1
    p pages · s slots of a page · j pages of a sequence

The batch axis of the primitive exists for `vmap`: the public operation has none. Keys are at index 0 and values at
index 1 of the axis of size two, so that heads have one axis, which may be split over devices.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,t,h,d], k and v [b,t,g,d], kv_pages [b,p,s,g,2,d] of one dtype; context_lens [b,n], block_tables [b,n,j],
    query_start_loc [b,m] and num_seqs [b,1] int32; sinks [b?,h,x] float32.
    """

    q: Any
    k: Any
    v: Any
    kv_pages: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any
    sinks: Any = None


class Outputs(NamedTuple):
    """o [b,t,h,d] in q's dtype, lse [b,t,h] float32, new_pages in the place of kv_pages."""

    o: Any
    lse: Any
    new_pages: Any


ragged_page_attention_v3 = ForwardOnly(
    "ragged_page_attention_v3",
    Operands,
    Outputs,
    {
        "q": axes("b t h d"),
        "k": axes("b t g d"),
        "v": axes("b t g d"),
        "kv_pages": axes("b p s g 2 d"),
        "context_lens": axes("b n"),
        "block_tables": axes("b n j"),
        "query_start_loc": axes("b m"),
        "num_seqs": axes("b 1"),
        "sinks": axes("b? h x"),
        "o": axes("b t h d"),
        "lse": axes("b t h"),
        "new_pages": axes("b p s g 2 d"),
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(advice="shard the heads"),
    in_place={"new_pages": "kv_pages"},
)
