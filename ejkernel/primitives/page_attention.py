"""page_attention: one query of each sequence attends over the sequence's keys and values in a paged cache.

    m mapped by vmap · b sequences · h query heads · g key/value heads · d features of keys · e features of values
    p pages · s slots of a page · j pages of a sequence · l rows of a plan, i work items for each

Sequences are the batch; the public operation has no axis m. An axis `m?` may have size 1 and is then broadcast, so that
an unmapped pool of pages is not repeated. Sequences may be split over devices, each of which has the whole pool or
some heads of it.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [m,b,h,d]; k_pages [m?,p,s,g,d] and v_pages [m?,p,s,g,e] of q's dtype, float8_e4m3fn or int8; context_lens [m,b]
    and block_tables [m,b,j] int32; sinks [m?,h,x], k_scale and v_scale [m?,p?,s?,g?] float32; plan [m?,l,i,8] int32.
    A plan with l ≠ b rows belongs to a step of which the operands are one device's part, and is ignored.
    """

    q: Any
    k_pages: Any
    v_pages: Any
    context_lens: Any
    block_tables: Any
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    plan: Any = None


class Outputs(NamedTuple):
    """o [m,b,h,e] in q's dtype, lse [m,b,h] float32."""

    o: Any
    lse: Any


page_attention = ForwardOnly(
    "page_attention",
    Operands,
    Outputs,
    {
        "q": axes("m b h d"),
        "k_pages": axes("m? p s g d"),
        "v_pages": axes("m? p s g e"),
        "context_lens": axes("m b"),
        "block_tables": axes("m b j"),
        "sinks": axes("m? h x"),
        "k_scale": axes("m? p? s? g?"),
        "v_scale": axes("m? p? s? g?"),
        "plan": axes("m? l i 8"),
        "o": axes("m b h e"),
        "lse": axes("m b h"),
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(fold="m", split=("m", "b", "h", "g"), advice="shard the sequences or the heads"),
)
