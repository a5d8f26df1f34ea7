"""blocksparse_attention on Hopper GPUs: flash_attention's forward and backward over lists of blocks, by Mosaic GPU.

Pallas is imported only when a kernel is first needed. The tangent is Triton's.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Backend, Platform, Target

from .. import flash_attention
from .._supports import refuses_given
from . import configs

ABSENT = ("q_segment_ids", "kv_segment_ids", "cu_seqlens_q")


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    wrong = refuses_given(operands, flash_attention.PAIRS) or flash_attention.supports(spec, operands.attention, target)
    return wrong or _reason("", spec, operands, target)


def supports_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if spec.deterministic or spec.batch_invariant:
        return "deterministic, batch_invariant: dq is summed by atomic additions, in another order in every run"
    if operands.sinks is not None:
        return "sinks: their gradient is not defined here for a query that sees no block"
    wrong = refuses_given(operands, flash_attention.PAIRS) or flash_attention.supports_bwd(
        spec, operands.attention, target
    )
    return wrong or _reason("_bwd", spec, operands, target)


def takes(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward leaves these operands to others, or None."""
    return supports(spec, operands, target) or flash_attention.takes(spec, operands.attention, target)


def takes_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward leaves these operands to others, or None."""
    return supports_bwd(spec, operands, target) or flash_attention.takes_bwd(spec, operands.attention, target)


def _reason(suffix: str, spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    for name in ABSENT:
        if getattr(operands, name) is not None:
            return f"{name} may mask some keys of a kept block for every query, and such keys may hold NaN"
    if spec.precision == "e4m3":
        return "precision 'e4m3': with lists of blocks the kernels compute in bfloat16 and float16"
    if not configs.space("blocksparse_attention" + suffix, operands, spec, target):
        return f"block_size is {spec.block_size}; no tile size of the Mosaic GPU kernels divides it"
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
