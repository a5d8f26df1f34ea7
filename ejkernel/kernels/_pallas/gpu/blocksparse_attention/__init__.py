"""blocksparse_attention on Hopper GPUs: the forward of flash_attention over lists of blocks, compiled by Mosaic GPU.

What stands here imports no Pallas; the kernel is imported when it is first needed. The derivatives are Triton's.
"""

from ejkernel.kernels._tier import Tier
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Backend, Platform, Target

from .. import flash_attention
from . import configs

ABSENT = ("q_segment_ids", "kv_segment_ids", "cu_seqlens_q")


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    if reason := flash_attention.supports(spec, operands.attention, target):
        return reason
    for name in ABSENT:
        if getattr(operands, name) is not None:
            return f"{name}: it may hide keys of a block that is kept from all queries, and these may hold anything"
    if spec.precision == "e4m3":
        return "precision e4m3: the lists of blocks are those of bfloat16 and float16"
    if not configs.space("blocksparse_attention", operands, spec, target):
        return f"blocks of {spec.block_size}, in which no tiles of these kernels fit evenly"
    return None


def takes(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward leaves these operands to others, or None."""
    return flash_attention.takes(spec, operands.attention, target) or supports(spec, operands, target)


_tier = Tier(
    __name__,
    "blocksparse_attention",
    BlocksparseAttentionSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.GPU,
    priority=200,
    refuses=configs.refuses,
)

blocksparse_attention = _tier.forward("forward", takes)

_tier.register("blocksparse_attention", blocksparse_attention)
