"""mean_pooling in Triton: the portable GPU tier (CUDA from sm_80 on, and ROCm).

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100
LARGEST_TILE = 128


def supports(spec: MeanPoolingSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "rocm" and target.device_kind is None:
        return "jax-triton compiles for rocm only where such a GPU is"
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.compute_capability / 10}"
    if reason := _launch.missing():
        return reason
    if operands.x.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"x is {operands.x.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if 0 in operands.x.shape:
        return "no tokens or no features"
    return None


def heuristic(spec: MeanPoolingSpec, operands: Operands, target: Target) -> KernelConfig:
    """Tiles of 4096 elements, 1024 bytes of features wide where there are as many."""
    return space(spec, operands, target)[0]


def space(spec: MeanPoolingSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """Tiles of 16 to 64 tokens, or of the chunk that was asked for, up to 512 bytes or 1 KiB of features wide."""
    chunk = spec.chunk_size and min(LARGEST_TILE, max(16, 1 << (spec.chunk_size - 1).bit_length()))
    features = max(16, 1 << (operands.x.shape[2] - 1).bit_length())
    sizes = ((16, 512), (32, 256), (16, 256), (64, 128))
    return [
        KernelConfig(
            block_q=chunk or tokens,
            block_k=min(features, width // max(1, operands.x.dtype.itemsize // 2)),
            num_warps=4,
            platform=Platform.TRITON,
            backend=Backend.GPU,
        )
        for tokens, width in sizes
    ]


def _registered(operation: str):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.TRITON, Backend.GPU, PRIORITY)
    configured, emitting = configured_by(heuristic, space), emits(*_launch.CUSTOM_CALLS)
    return lambda implementation: register(supported_if(supports)(configured(emitting(implementation))))


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
