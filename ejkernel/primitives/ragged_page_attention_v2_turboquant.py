"""ragged_page_attention_v2_turboquant: attention over a paged cache of keys and values quantised by TurboQuant.

    b batch · t tokens of the step · h query heads · g key/value heads · d features · n sequences · m = n + 1
    p pages · s slots of a page · j pages of a sequence
    f = d rotated features · e rows of the projection · i = d / 2 bytes of indices · w = e / 8 bytes of signs
    k, v entries of the codebooks of keys and of values

The batch axis of the primitive exists for `vmap`: the public operation has none. An axis `b?` may have size 1 and is
then broadcast, so that an unmapped pool of pages is not repeated.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout

TABLES = {
    "context_lens": axes("b n"),
    "block_tables": axes("b n j"),
    "query_start_loc": axes("b m"),
    "num_seqs": axes("b 1"),
}
MATRICES = {
    "rotation_matrix": axes("b? f d"),
    "qjl_projection": axes("b? e f"),
    "key_codebook": axes("b? k"),
    "value_codebook": axes("b? v"),
}


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,t,h,d]; key_indices_pages [b?,p,s,g,i], key_signs_pages [b?,p,s,g,w] and value_indices_pages [b?,p,s,g,i]
    uint8; key_norms_pages [b?,p,s,g,2] and value_norms_pages [b?,p,s,g] of float dtypes; context_lens [b,n],
    block_tables [b,n,j], query_start_loc [b,m] and num_seqs [b,1] int32; rotation_matrix [b?,f,d], qjl_projection
    [b?,e,f], key_codebook [b?,k], value_codebook [b?,v] and sinks [b?,h,x] float32.
    """

    q: Any
    key_indices_pages: Any
    key_signs_pages: Any
    key_norms_pages: Any
    value_indices_pages: Any
    value_norms_pages: Any
    context_lens: Any
    block_tables: Any
    query_start_loc: Any
    num_seqs: Any
    rotation_matrix: Any
    qjl_projection: Any
    key_codebook: Any
    value_codebook: Any
    sinks: Any = None


class Outputs(NamedTuple):
    """o [b,t,h,d] in q's dtype, lse [b,t,h] float32."""

    o: Any
    lse: Any


ragged_page_attention_v2_turboquant = ForwardOnly(
    "ragged_page_attention_v2_turboquant",
    Operands,
    Outputs,
    {
        "q": axes("b t h d"),
        "key_indices_pages": axes("b? p s g i"),
        "key_signs_pages": axes("b? p s g w"),
        "key_norms_pages": axes("b? p s g 2"),
        "value_indices_pages": axes("b? p s g i"),
        "value_norms_pages": axes("b? p s g"),
        **TABLES,
        **MATRICES,
        "sinks": axes("b? h x"),
        "o": axes("b t h d"),
        "lse": axes("b t h"),
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(advice="shard the heads"),
)
