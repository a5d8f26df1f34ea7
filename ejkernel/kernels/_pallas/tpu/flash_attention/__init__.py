"""flash_attention on TPU: Pallas kernels, compiled by Mosaic.

Pallas is imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs
from ejkernel.types import Backend, Platform, Target


def supports(spec: FlashAttentionSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernels cannot run on these operands (arrays or shapes), or None."""
    from .configs import PRODUCTS, fitting_blocks

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {operands.q.dtype}; the matrix unit takes bfloat16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256:
            return f"{name} has {size} features; the kernels take up to 256"
    if 0 in operands.q.shape or 0 in operands.k.shape:
        return "an empty batch or sequence"
    if operands.dropout is not None:
        return "dropout: Philox needs 64-bit products of 32-bit integers, which the vector unit does not compute"
    if abs(spec.softmax_scale) / (spec.softcap or 1.0) > 1e38:
        return f"softmax_scale / softcap is {spec.softmax_scale:g} / {spec.softcap:g}, which overflows float32"
    arbitrary = (operands.mask, operands.q_segment_ids, operands.cu_seqlens_q)
    if spec.batch_invariant and any(x is not None for x in arbitrary):
        return "batch_invariant: the size of tiles depends on the tile table of the whole batch"
    if not all(fitting_blocks(operation, operands, target) for operation in PRODUCTS):
        return "no tile size fits both memories: small tiles make the tile table exceed SMEM, large ones exceed VMEM"
    return None


_kernels = KernelTrio(
    __name__, "flash_attention", FlashAttentionSpec, Operands, Outputs, Platform.PALLAS, Backend.TPU, priority=100
)

flash_attention = _kernels.forward("forward", supports)
flash_attention_jvp = _kernels.tangent("tangent", supports)
flash_attention_bwd = _kernels.backward("backward", supports, ("split",))

_kernels.register("flash_attention", flash_attention, flash_attention_jvp, flash_attention_bwd)
