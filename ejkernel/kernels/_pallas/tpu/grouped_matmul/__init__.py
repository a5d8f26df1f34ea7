"""grouped_matmul on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._grouped_matmul import scale_varies_alone
from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives.grouped_matmul import GroupedMatmulSpec, Operands, Outputs
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100
# Scalar memory of every chip since v4 is 1 MiB; the table of visits leaves some to the compiler.
SMEM_BYTES = 768 * 1024


def supports(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the forward and the tangent cannot run on these operands (arrays or shapes), or None."""
    from .configs import table_bytes

    lhs, rhs = operands.lhs, operands.rhs
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if lhs.dtype.name not in ("bfloat16", "float32"):
        return f"lhs is {lhs.dtype}; the matrix unit takes bfloat16 and float32"
    if rhs.dtype.name not in (lhs.dtype.name, "int8"):
        return f"rhs is {rhs.dtype}; the kernels take the dtype of lhs and int8"
    if spec.preferred_element_type not in ("bfloat16", "float32"):
        return f"the result is {spec.preferred_element_type}; the kernels give bfloat16 and float32"
    if 0 in lhs.shape:
        return "no rows or no features"
    for name, size in (("contracted features", lhs.shape[2]), ("columns", rhs.shape[3])):
        if size > 8192 and size % 128:
            return f"{size} {name}; the kernels cut only multiples of 128"
    if (size := table_bytes(operands)) > SMEM_BYTES:
        return f"the table of visits takes {size} bytes; scalar memory has room for {SMEM_BYTES}"
    return None


def supports_bwd(spec: GroupedMatmulSpec, operands: Operands, target: Target) -> str | None:
    """Why the backward cannot run on these operands, or None."""
    return scale_varies_alone(operands) or supports(spec, operands, target)


def _heuristic(operation: str, spec: GroupedMatmulSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operands)


def _space(operation: str, spec: GroupedMatmulSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operands)


def _registered(operation: str, predicate):
    """The decorators of the three implementations."""
    register = kernel_registry.register(operation, Platform.PALLAS, Backend.TPU, PRIORITY)
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    return lambda implementation: register(supported_if(predicate)(configured(implementation)))


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
