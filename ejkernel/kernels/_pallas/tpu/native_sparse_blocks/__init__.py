"""native_sparse_blocks on TPU: a Pallas kernel, compiled by Mosaic."""

from functools import partial

from jax import Array

from ejkernel.kernels._registry import Backend, Platform, configured_by, kernel_registry, supported_if
from ejkernel.primitives.native_sparse_blocks import NativeSparseBlocksSpec, Operands, Outputs
from ejkernel.types import KernelConfig, Target

from .. import refuses


def supports(spec: NativeSparseBlocksSpec, operands: Operands, target: Target) -> str | None:
    """Why the kernel does not take the operands (arrays or shapes), or None."""
    q, k = operands.q, operands.k
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {q.dtype}; the matrix unit takes bfloat16 and float32"
    if 0 in (*q.shape, *k.shape) or k.shape[1] < spec.block_size:
        return "no queries, or no complete block of keys"
    if q.shape[3] % 8:
        return f"{q.shape[3]} features; the TPU kernel takes multiples of 8"
    from .configs import space

    if not space(operands, spec):
        return "the scores of a tile do not fit into vector memory"
    return None


def space(spec: NativeSparseBlocksSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """The configs worth measuring, the most promising first."""
    from . import configs

    return configs.space(operands, spec)


@kernel_registry.register("native_sparse_blocks", Platform.PALLAS, Backend.TPU, priority=100)
@configured_by(
    lambda *call: space(*call)[0], space, refuses=partial(refuses, "native_sparse_blocks", blocks=("block_q",))
)
@supported_if(supports)
def native_sparse_blocks(
    *operands: Array | None,
    spec: NativeSparseBlocksSpec = NativeSparseBlocksSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The indices of the selected blocks, by the Pallas kernel for TPUs."""
    from .selection import selected

    return Outputs(selected(Operands(*operands), spec, config.block_q))
