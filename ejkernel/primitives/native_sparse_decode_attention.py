"""native_sparse_decode_attention: one query of each sequence over a cache, and over the means of its blocks.

    b sequences · t keys · h query heads · g key/value heads, h = g · repeat · d features of keys · e of values
    x blocks of keys with a mean · n blocks of a list, which the query heads of a group share

The query of a sequence is its last token.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import ShortRepr
from ._axes import axes
from ._forward_only import ForwardOnly
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent. Either ranks and k_cmp are given or block_indices.

    q [b,h,d], k [b,t,g,d] and v [b,t,g,e] of one dtype; sequence_end [b] int32; k_cmp [b,x,g,d] and v_cmp [b,x,g,e],
    the means of blocks; the gates g_cmp, g_slc and g_swa [b,h]; ranks [b?,n] int32, 0 … n − 1: the ranks of the blocks
    to choose, where 0 is the best one; block_indices [b,g,n] int32: numbers out of range are ignored, and duplicates
    count once. The compressed branch has g_cmp and v_cmp, and the window branch the window of the spec.
    """

    q: Any
    k: Any
    v: Any
    sequence_end: Any
    k_cmp: Any = None
    v_cmp: Any = None
    g_cmp: Any = None
    g_slc: Any = None
    g_swa: Any = None
    ranks: Any = None
    block_indices: Any = None


class Outputs(NamedTuple):
    """o [b,h,e] in q's dtype, and the blocks [b,g,n] int32, −1 where a query sees fewer."""

    o: Any
    blocks: Any


@dataclass(frozen=True, repr=False)
class NativeSparseDecodeAttentionSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        block_size: keys of a block.
        softmax_scale: the static scale of q·kᵀ.
        window: the number of keys of the window branch, which end with the query's own; None without this branch.
    """

    block_size: int = 64
    softmax_scale: float = 1.0
    window: int | None = None


native_sparse_decode_attention = ForwardOnly(
    "native_sparse_decode_attention",
    Operands,
    Outputs,
    {
        "q": axes("b h d"),
        "k": axes("b t g d"),
        "v": axes("b t g e"),
        "sequence_end": axes("b"),
        "k_cmp": axes("b x g d"),
        "v_cmp": axes("b x g e"),
        "g_cmp": axes("b h"),
        "g_slc": axes("b h"),
        "g_swa": axes("b h"),
        "ranks": axes("b? n"),
        "block_indices": axes("b g n"),
        "o": axes("b h e"),
        "blocks": axes("b g n"),
    },
    dtypes=lambda dtypes, spec: {"o": dtypes["q"], "blocks": np.dtype(np.int32)},
    instead="train with native_sparse_attention",
    layout=Layout(advice="shard the batch or the heads"),
)
