"""native_sparse_attention: each query attends over a list of blocks of keys, the selected branch of the operation.

    b batch · s queries · t keys · h query heads · g key/value heads, h = g · repeat · d features of keys · e of values
    n blocks of a list, which the query heads of a group share · m sequences + 1

The last query is aligned with the last key, i' = i + t − s; a query sees the keys j ≤ i' of its blocks. The other two
branches, and the selection of blocks, are separate operations.
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

    q [b,s,h,d], k [b,t,g,d] and v [b,t,g,e] of one dtype; block_indices [b,s,g,n] int32: block x is the keys from
    x · block_size on, numbers out of range are ignored, and duplicates count once; cu_seqlens [b?,m] int32: blocks and
    positions are counted within each sequence, and s = t.
    """

    q: Any
    k: Any
    v: Any
    block_indices: Any
    cu_seqlens: Any = None


class Outputs(NamedTuple):
    """o [b,s,h,e] in q's dtype, lse [b,h,s] float32."""

    o: Any
    lse: Any


@dataclass(frozen=True, repr=False)
class NativeSparseAttentionSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        block_size: keys of a block.
        softmax_scale: the static scale of q·kᵀ.
    """

    block_size: int = 64
    softmax_scale: float = 1.0


def dtypes_of_outputs(dtypes: Mapping[str, Any], spec: NativeSparseAttentionSpec) -> dict[str, Any]:
    """The dtypes of the outputs: o has that of q, lse that of statistics."""
    del spec
    return {"o": dtypes["q"], "lse": np.promote_types(dtypes["q"], np.float32)}


native_sparse_attention = Trio(
    "native_sparse_attention",
    Operands,
    Outputs,
    {
        "q": axes("b s h d"),
        "k": axes("b t g d"),
        "v": axes("b t g e"),
        "block_indices": axes("b s g n"),
        "cu_seqlens": axes("b? m"),
        "o": axes("b s h e"),
        "lse": axes("b h s"),
    },
    differentiable=("q", "k", "v"),
    dtypes=dtypes_of_outputs,
    layout=Layout(advice="shard the batch or the heads"),
    linear=[("v",)],
)
