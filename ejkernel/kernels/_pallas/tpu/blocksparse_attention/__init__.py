"""blocksparse_attention on TPU: the kernels of flash_attention over a schedule of the tiles that a block mask keeps.

Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import flash_attention
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Backend, Platform, Target


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels cannot run on these operands (arrays or shapes), or None."""
    if reason := flash_attention.supports(spec, operands.attention, target):
        return reason
    from .configs import PRODUCTS, fitting_tiles

    lengths = operands.q.shape[1], operands.k.shape[1]
    if any(block < length and block % 128 for block, length in zip(spec.block_size, lengths, strict=True)):
        return f"block_size is {spec.block_size}; the kernels take multiples of 128"
    if spec.batch_invariant:
        return "batch_invariant: the size of tiles depends on the tile table of the whole batch"
    if not all(fitting_tiles(operation, operands, spec, target) for operation in PRODUCTS):
        return "no tile size fits both memories: small tiles make the tile table exceed SMEM, large ones exceed VMEM"
    return None


def supports_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    if operands.sinks is not None and (operands.mask is not None or operands.q_segment_ids is not None):
        return "sinks with segments or a mask: fully masked queries are known by lse = −∞, which sinks make finite"
    return supports(spec, operands, target)


_kernels = KernelTrio(
    __name__,
    "blocksparse_attention",
    BlocksparseAttentionSpec,
    Operands,
    Outputs,
    Platform.PALLAS,
    Backend.TPU,
    priority=100,
)

blocksparse_attention = _kernels.forward("kernels", supports)
blocksparse_attention_jvp = _kernels.tangent("kernels", supports)
blocksparse_attention_bwd = _kernels.backward("kernels", supports_bwd, ("split",))

_kernels.register("blocksparse_attention", blocksparse_attention, blocksparse_attention_jvp, blocksparse_attention_bwd)
