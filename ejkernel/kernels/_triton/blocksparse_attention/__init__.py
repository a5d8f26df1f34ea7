"""blocksparse_attention in Triton: flash attention whose loops run over lists of the tiles that a block mask keeps.

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch, flash_attention
from ejkernel.primitives.blocksparse_attention import BlocksparseAttentionSpec, Operands
from ejkernel.primitives.flash_attention import Outputs
from ejkernel.types import Target


def supports(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward cannot run on these operands (arrays or shapes), or None."""
    return flash_attention.supports(spec, operands.attention, target) or _reason(spec, operands)


def supports_jvp(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the tangent cannot run on these operands, or None."""
    return flash_attention.supports_jvp(spec, operands.attention, target) or _reason(spec, operands)


def supports_bwd(spec: BlocksparseAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    without_bias = operands.attention._replace(bias=None)  # flash_attention has its gradient in dense calls only
    of_flash = flash_attention.supports_bwd(spec, without_bias, target)
    return of_flash or supports(spec, operands, target)


def _reason(spec: BlocksparseAttentionSpec, operands: Operands) -> str | None:
    lengths = operands.q.shape[1], operands.k.shape[1]
    if any(block < length and block % 16 for block, length in zip(spec.block_size, lengths, strict=True)):
        return f"block_size is {spec.block_size}; Triton's kernels take multiples of 16"
    if operands.dropout is not None and operands.cu_seqlens_q is not None:
        return "dropout over packed sequences is not supported by Triton's kernels"
    return None


_kernels = _launch.trio(__name__, "blocksparse_attention", BlocksparseAttentionSpec, Operands, Outputs)

blocksparse_attention = _kernels.forward("forward", supports)
blocksparse_attention_jvp = _kernels.tangent("tangent", supports_jvp)
blocksparse_attention_bwd = _kernels.backward("backward", supports_bwd)

_kernels.register("blocksparse_attention", blocksparse_attention, blocksparse_attention_jvp, blocksparse_attention_bwd)
