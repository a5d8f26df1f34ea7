"""ragged_page_attention_v3_turboquant: quantises a step's keys and values into a paged cache, and attends over it.

    b batch · t tokens of the step · h query heads · g key/value heads · d features · n sequences · m = n + 1
    p pages · s slots of a page · j pages of a sequence
    f = d rotated features · e rows of the projection · i = d / 2 bytes of indices · w = e / 8 bytes of signs
    k, v entries of the codebooks of keys and of values

The batch axis of the primitive exists for `vmap`: the public operation has none.
"""

from typing import Any, NamedTuple

from ._axes import axes
from ._forward_only import ForwardOnly
from ._pages import result_dtypes
from ._sharding import Layout
from .ragged_page_attention_v2_turboquant import MATRICES, TABLES

POOLS = {
    "key_indices_pages": axes("b p s g i"),
    "key_signs_pages": axes("b p s g w"),
    "key_norms_pages": axes("b p s g 2"),
    "value_indices_pages": axes("b p s g i"),
    "value_norms_pages": axes("b p s g"),
}


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,t,h,d], k and v [b,t,g,d] of one dtype; key_indices_pages [b,p,s,g,i], key_signs_pages [b,p,s,g,w] and
    value_indices_pages [b,p,s,g,i] uint8; key_norms_pages [b,p,s,g,2] and value_norms_pages [b,p,s,g] of float dtypes;
    context_lens [b,n], block_tables [b,n,j], query_start_loc [b,m] and num_seqs [b,1] int32; rotation_matrix [b?,f,d],
    qjl_projection [b?,e,f], key_codebook [b?,k], value_codebook [b?,v] and sinks [b?,h,x] float32.
    """

    q: Any
    k: Any
    v: Any
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
    """o [b,t,h,d] in q's dtype, lse [b,t,h] float32, and each pool in the place of the operand."""

    o: Any
    lse: Any
    new_key_indices_pages: Any
    new_key_signs_pages: Any
    new_key_norms_pages: Any
    new_value_indices_pages: Any
    new_value_norms_pages: Any


ragged_page_attention_v3_turboquant = ForwardOnly(
    "ragged_page_attention_v3_turboquant",
    Operands,
    Outputs,
    {
        "q": axes("b t h d"),
        "k": axes("b t g d"),
        "v": axes("b t g d"),
        **POOLS,
        **TABLES,
        **MATRICES,
        "sinks": axes("b? h x"),
        "o": axes("b t h d"),
        "lse": axes("b t h"),
        **{f"new_{name}": of for name, of in POOLS.items()},
    },
    dtypes=result_dtypes,
    instead="train with flash_attention",
    layout=Layout(advice="shard the heads"),
    in_place={f"new_{name}": name for name in POOLS},
)
