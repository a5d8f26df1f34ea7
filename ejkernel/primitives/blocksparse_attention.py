"""blocksparse_attention: flash_attention over the blocks of keys that a block mask keeps for each block of queries.

The operands are those of flash_attention and the block mask, whose axes are

    x blocks of queries, ⌈s / block_q⌉ · y blocks of keys, ⌈t / block_k⌉
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from . import flash_attention as flash
from ._axes import axes
from ._sharding import Layout
from ._trio import Trio
from .flash_attention import FlashAttentionSpec, Outputs


class Operands(NamedTuple):
    """The arrays of a call, in order; None where absent.

    block_mask [b?,h?,x,y] bool; all others are those of flash_attention.
    """

    q: Any
    k: Any
    v: Any
    block_mask: Any
    bias: Any = None
    mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    sinks: Any = None
    softmax_scale: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    dropout: Any = None

    @property
    def attention(self) -> flash.Operands:
        """The operands of flash_attention."""
        return flash.Operands(*(getattr(self, name) for name in flash.Operands._fields))


@dataclass(frozen=True, repr=False)
class BlocksparseAttentionSpec(FlashAttentionSpec):
    """What is computed, besides the arrays.

    Attributes:
        block_size: queries and keys of a block; the last blocks of the two axes may have fewer.
    """

    block_size: tuple[int, int] = (128, 128)


blocksparse_attention = Trio(
    "blocksparse_attention",
    Operands,
    Outputs,
    {**flash.TABLE, "block_mask": axes("b? h? x y")},
    differentiable=flash.flash_attention.differentiable,
    dtypes=flash.dtypes_of_outputs,
    layout=Layout(advice="shard the batch or the heads"),
    linear=flash.flash_attention.linear,
)
