"""grouped_matmul in Triton: the portable GPU tier (CUDA from sm_80 on, and ROCm).

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._grouped_matmul import scale_varies_alone
from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100
LARGEST = 4096
"""Groups whose sizes a program keeps in registers."""


def supports(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    lhs, rhs = operands.lhs, operands.rhs
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "rocm" and target.device_kind is None:
        return "jax-triton compiles for rocm only where such a GPU is"
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.compute_capability / 10}"
    if reason := _launch.missing():
        return reason
    if lhs.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"lhs is {lhs.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if rhs.dtype.name.startswith("float8") and (target.platform == "rocm" or target.compute_capability < 90):
        return f"rhs is {rhs.dtype}, which Triton converts from Hopper on"
    if operands.group_sizes.shape[1] > LARGEST:
        return f"{operands.group_sizes.shape[1]} groups; Triton's kernels take up to {LARGEST}"
    if 0 in lhs.shape:
        return "no rows or no features"
    return None


def supports_bwd(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return scale_varies_alone(operands) or supports(spec, operands, target)


def _heuristic(operation: str, spec: GroupedMatmulSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operation, operands, target)


def _space(operation: str, spec: GroupedMatmulSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operation, operands, target)


def _registered(operation: str, predicate):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.TRITON, Backend.GPU, PRIORITY)
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    emitting = emits(*_launch.CUSTOM_CALLS)
    return lambda implementation: register(supported_if(predicate)(configured(emitting(implementation))))


@_registered("grouped_matmul", supports)
def grouped_matmul(
    *operands: Array | None, spec: GroupedMatmulSpec = GroupedMatmulSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o."""
    from .forward import grouped_matmul

    return grouped_matmul(*operands, spec=spec, config=config)


@_registered("grouped_matmul_jvp", supports)
def grouped_matmul_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: GroupedMatmulSpec = GroupedMatmulSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangent of o; a tangent of None is zero."""
    from .forward import grouped_matmul_jvp

    return grouped_matmul_jvp(primals, outputs, tangents, spec=spec, config=config)


@_registered("grouped_matmul_bwd", supports_bwd)
def grouped_matmul_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: GroupedMatmulSpec = GroupedMatmulSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt."""
    from .backward import grouped_matmul_bwd

    return grouped_matmul_bwd(primals, outputs, cotangents, wrt=wrt, spec=spec, config=config)
