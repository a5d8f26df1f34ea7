"""native_sparse_blocks: the selection of the blocks of keys that each query attends to in native_sparse_attention.

b batch · s queries · t keys · h query heads · g key/value heads, h = g · repeat · d features
n blocks of a list, which the query heads of a group share · m sequences + 1
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..types import ShortRepr
from ._axes import axes
from ._forward_only import ForwardOnly
from ._sharding import Layout


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    q [b,s,h,d] and k [b,t,g,d] of one dtype; ranks [b?,n] int32, 0 … n − 1: the ranks of the blocks to return, where
    0 is the best one; cu_seqlens [b?,m] int32: blocks are counted within each sequence, and s = t.
    """

    q: Any
    k: Any
    ranks: Any
    cu_seqlens: Any = None


class Outputs(NamedTuple):
    """block_indices [b,s,g,n] int32, −1 where a query sees fewer blocks."""

    block_indices: Any


@dataclass(frozen=True, repr=False)
class NativeSparseBlocksSpec(ShortRepr):
    """What is computed, besides the arrays.

    Attributes:
        block_size: keys of a block.
        softmax_scale: the static scale of the products of queries and mean keys.
    """

    block_size: int = 64
    softmax_scale: float = 1.0


native_sparse_blocks = ForwardOnly(
    "native_sparse_blocks",
    Operands,
    Outputs,
    {
        "q": axes("b s h d"),
        "k": axes("b t g d"),
        "ranks": axes("b? n"),
        "cu_seqlens": axes("b? m"),
        "block_indices": axes("b s g n"),
    },
    dtypes=lambda dtypes, spec: {"block_indices": np.dtype(np.int32)},
    instead="a choice does not move: take it of jax.lax.stop_gradient of q and k, as native_sparse_attention does",
    layout=Layout(advice="shard the batch or the heads"),
)
