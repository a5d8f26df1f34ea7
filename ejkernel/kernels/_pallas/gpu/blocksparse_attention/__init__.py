"""blocksparse_attention on Hopper GPUs: flash_attention's forward and backward over lists of blocks, by Mosaic GPU.

What stands here imports no Pallas; the kernels are imported when they are first needed. The tangent is Triton's.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Backend, Platform, Target

from .. import flash_attention
from . import configs

ABSENT = ("q_segment_ids", "kv_segment_ids", "cu_seqlens_q")


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return flash_attention.supports(spec, operands.attention, target) or _reason("", spec, operands, target)


def supports_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if spec.deterministic or spec.batch_invariant:
        return "dq is summed in no certain order, and so not the same in every run"
    if operands.sinks is not None:
        return "sinks: what a query without blocks has of them may be anything"
    return flash_attention.supports_bwd(spec, operands.attention, target) or _reason("_bwd", spec, operands, target)


def takes(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward leaves these operands to others, or None."""
    return flash_attention.takes(spec, operands.attention, target) or supports(spec, operands, target)


def takes_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward leaves these operands to others, or None."""
    return flash_attention.takes_bwd(spec, operands.attention, target) or supports_bwd(spec, operands, target)


def _reason(suffix: str, spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    for name in ABSENT:
        if getattr(operands, name) is not None:
            return f"{name}: it may hide keys of a block that is kept from all queries, and these may hold anything"
    if spec.precision == "e4m3":
        return "precision e4m3: the lists of blocks are those of bfloat16 and float16"
    if not configs.space("blocksparse_attention" + suffix, operands, spec, target):
        return f"blocks of {spec.block_size}, in which no tiles of these kernels fit evenly"
    return None


_kernels = KernelTrio(
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

blocksparse_attention = _kernels.forward("forward", takes)
blocksparse_attention_bwd = _kernels.backward("backward", takes_bwd)

_kernels.register("blocksparse_attention", blocksparse_attention, blocksparse_attention_bwd)
