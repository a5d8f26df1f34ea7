"""ragged_page_attention: the tokens of a step, prefill and decode mixed, attend over their sequences in a paged cache.

    b batch · t tokens of the step · h query heads · g key/value heads · d features · n sequences · m = n + 1
    p pages · s slots of a page · j pages of a sequence · w drafts · l rows of a plan, i work items for each

The batch axis of the primitive exists for `vmap`: the public operation has none. An axis `b?` may have size 1 and is
then broadcast, so that an unmapped pool of pages is not repeated. Keys are at index 0 and values at index 1 of the axis
of size two, so that heads have one axis, which may be split over devices.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,t,h,d]; kv_pages [b?,p,s,g,2,d] of q's dtype, float8_e4m3fn or int8; context_lens [b,n], block_tables [b,n,j],
    query_start_loc [b,m] and num_seqs [b,1] int32; sinks [b?,h,x], k_scale and v_scale [b?,p?,s?,g?] float32;
    draft_mask [b,t,w] bool; plan [b?,l,i,8] int32.
    """

    q: Any
    kv_pages: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    draft_mask: Any = None
    plan: Any = None


class Outputs(NamedTuple):
    """o [b,t,h,d] in q's dtype, lse [b,t,h] float32."""

    o: Any
    lse: Any


ragged_page_attention = ForwardOnly(
    "ragged_page_attention",
    Operands,
    Outputs,
    {
        "q": axes("b t h d"),
        "kv_pages": axes("b? p s g 2 d"),
        "context_lens": axes("b n"),
        "block_tables": axes("b n j"),
        "query_start_loc": axes("b m"),
        "num_seqs": axes("b 1"),
        "sinks": axes("b? h x"),
        "k_scale": axes("b? p? s? g?"),
        "v_scale": axes("b? p? s? g?"),
        "draft_mask": axes("b t w"),
        "plan": axes("b? l i 8"),
        "o": axes("b t h d"),
        "lse": axes("b t h"),
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(advice="shard the heads"),
)
