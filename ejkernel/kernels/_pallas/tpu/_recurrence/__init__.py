"""The linear recurrence on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {operands.q.dtype}; the kernels take bfloat16 and float32"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size > 256:
            return f"{name} has {size} features; the kernels take up to 256"
    if 0 in operands.q.shape or 0 in operands.v.shape:
        return "an empty batch or sequence"
    if operands.q.shape[1] == 1:
        return "a single token, which fills no block"
    if operands.spans is not None:
        return "sequences of several lengths (cu_seqlens)"
    if operands.gv is not None:
        return "decays of value features (gv)"
    return None


def heuristic(spec: RecurrenceSpec, operands: Operands, target: Target) -> KernelConfig:
    """The config for a call that was not tuned."""
    return space(spec, operands, target)[0]


def space(spec: RecurrenceSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """block_q is a chunk, at whose end a state is kept; block_k a block of it, short with decays by feature."""
    sizes = [(128, 128), (256, 128), (64, 64)] if operands.gk is None else [(64, 16), (128, 16)]
    return [KernelConfig(block_q=q, block_k=k, platform=Platform.PALLAS, backend=Backend.TPU) for q, k in sizes]


def _decorated(implementation):
    return supported_if(supports)(configured_by(heuristic, space)(implementation))


@_decorated
def recurrence(
    *operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and the final state."""
    from .kernels import recurrence

    return recurrence(Operands(*operands), spec, config)


@_decorated
def recurrence_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: RecurrenceSpec = RecurrenceSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and the final state; a tangent of None is zero."""
    from .kernels import recurrence_jvp

    return recurrence_jvp(primals, tangents, spec, config)


@_decorated
def recurrence_bwd(
    primals: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    wrt: tuple[str, ...],
    spec: RecurrenceSpec = RecurrenceSpec(),
    config: KernelConfig = KernelConfig(),
) -> tuple[Array, ...]:
    """The cotangents of the operands named in wrt; a cotangent of None is zero."""
    from .kernels import recurrence_bwd

    return recurrence_bwd(primals, cotangents, wrt, spec, config)


def register(operation: str) -> None:
    """Registers the three as the implementation of an operation of this family."""
    for suffix, implementation in (("", recurrence), ("_jvp", recurrence_jvp), ("_bwd", recurrence_bwd)):
        kernel_registry.register(operation + suffix, Platform.PALLAS, Backend.TPU, PRIORITY)(implementation)
