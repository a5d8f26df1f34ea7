"""mean_pooling on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100
# Scalar memory of every chip since v4 is 1 MiB; the table of visits leaves some to the compiler.
SMEM_BYTES = 768 * 1024


def supports(spec: MeanPoolingSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .kernels import table_bytes

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.x.dtype.name not in ("bfloat16", "float32"):
        return f"x is {operands.x.dtype}; the kernels take bfloat16 and float32"
    if 0 in operands.x.shape:
        return "no tokens or no features"
    if (features := operands.x.shape[2]) > 8192 and features % 128:
        return f"{features} features; the kernels cut only multiples of 128"
    if (size := table_bytes(operands, heuristic(spec, operands, target))) > SMEM_BYTES:
        return f"the table of visits takes {size} bytes; scalar memory has room for {SMEM_BYTES}"
    return None


def heuristic(spec: MeanPoolingSpec, operands: Operands, target: Target) -> KernelConfig:
    """Tiles of twice as many tokens as a segment has on average, or of the chunk that was asked for."""
    return space(spec, operands, target)[0]


def space(spec: MeanPoolingSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """Tiles from 64 to 1024 tokens, about twice the average segment, and 1024 or 512 features."""
    segments = 1 if operands.segments is None else operands.segments.shape[1]
    length = spec.chunk_size or 2 * operands.x.shape[1] // max(1, segments)
    tokens = min(1024, max(64, 1 << (length - 1).bit_length()))
    return [
        KernelConfig(block_q=tokens, block_k=features, platform=Platform.PALLAS, backend=Backend.TPU)
        for features in (1024, 512)
    ]


def _registered(operation: str):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.PALLAS, Backend.TPU, PRIORITY)
    configured = configured_by(heuristic, space)
    return lambda implementation: register(supported_if(supports)(configured(implementation)))


@_registered("mean_pooling")
def mean_pooling(
    *operands: Array | None, spec: MeanPoolingSpec = MeanPoolingSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o."""
    from .kernels import mean_pooling

    return Outputs(mean_pooling(Operands(*operands), config))


@_registered("mean_pooling_jvp")
def mean_pooling_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: MeanPoolingSpec = MeanPoolingSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangent of o, which is linear in x."""
    from .kernels import mean_pooling

    return Outputs(mean_pooling(Operands(tangents.x, primals.segments), config))


@_registered("mean_pooling_bwd")
def mean_pooling_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: MeanPoolingSpec = MeanPoolingSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangent of x."""
    from .kernels import mean_pooling_bwd

    return (mean_pooling_bwd(primals, cotangents.o, config),)
