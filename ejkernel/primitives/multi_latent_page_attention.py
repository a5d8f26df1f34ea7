"""multi_latent_page_attention: the tokens of a step attend over a paged cache of latents, which all heads share.

    b batch · t tokens of the step · h query heads · c features of a latent · d of its rotary part · f = c + d of both
    n sequences · m = n + 1 · p pages · s slots of a page · j pages of a sequence · w drafts
    l rows of a plan, i work items for each · k keys that a token names

The batch axis of the primitive exists for `vmap`: the public operation has none. An axis `b?` may have size 1 and is
then broadcast, so that an unmapped pool of pages is not repeated. Heads may be split over devices, each of which has
the whole pool.
"""

from typing import Any, NamedTuple

import numpy as np

from ._axes import axes
from ._forward_only import ForwardOnly
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q_latent [b,t,h,c] and q_rope [b,t,h,d] of one dtype; pages [b?,p,s,f] of that, float8_e4m3fn or int8; context_lens
    [b,n], block_tables [b,n,j], query_start_loc [b,m] and num_seqs [b,1] int32; sinks [b?,h,x] and k_scale [b?,p?,s?,1]
    float32; plan [b?,l,i,8] int32; draft_mask [b,t,w] bool; indices [b,t,k] int32.
    """

    q_latent: Any
    q_rope: Any
    pages: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any
    sinks: Any = None
    k_scale: Any = None
    plan: Any = None
    draft_mask: Any = None
    indices: Any = None


class Outputs(NamedTuple):
    """o [b,t,h,c] in q_latent's dtype, lse [b,t,h] float32."""

    o: Any
    lse: Any


multi_latent_page_attention = ForwardOnly(
    "multi_latent_page_attention",
    Operands,
    Outputs,
    {
        "q_latent": axes("b t h c"),
        "q_rope": axes("b t h d"),
        "pages": axes("b? p s f"),
        "context_lens": axes("b n"),
        "block_tables": axes("b n j"),
        "query_start_loc": axes("b m"),
        "num_seqs": axes("b 1"),
        "sinks": axes("b? h x"),
        "k_scale": axes("b? p? s? 1"),
        "plan": axes("b? l i 8"),
        "draft_mask": axes("b t w"),
        "indices": axes("b t k"),
        "o": axes("b t h c"),
        "lse": axes("b t h"),
    },
    dtypes=lambda dtypes, spec: {
        "o": dtypes["q_latent"],
        "lse": np.promote_types(dtypes["q_latent"], np.float32),
    },
    instead="train with flash_mla",
    layout=Layout(split=("b", "h"), group=None, advice="shard the heads"),
)
