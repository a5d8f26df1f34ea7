"""The linear recurrence in Triton: chunks on tensor cores, and single tokens for decoding.

What stands here imports neither Triton nor jax-triton; the kernels are imported when they are first needed.
"""

from functools import partial

from jax import Array

from ejkernel.kernels._registry import configured_by, emits, kernel_registry, supported_if
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if target.platform not in ("cuda", "rocm"):
        return f"Triton runs on cuda and rocm, not on {target.platform}"
    if target.platform == "rocm" and target.device_kind is None:
        return "jax-triton compiles for rocm only where such a GPU is"
    if target.platform == "cuda" and target.compute_capability < 80:
        return f"Triton's kernels need compute capability 8.0, not {target.compute_capability / 10}"
    if reason := _launch.missing():
        return reason
    if operands.q.dtype.name not in ("bfloat16", "float16", "float32"):
        return f"q is {operands.q.dtype}; Triton's kernels take bfloat16, float16 and float32"
    if operands.q.shape[3] > 256:
        return f"q has {operands.q.shape[3]} features; Triton's kernels take up to 256"
    for name, size in (("q", operands.q.shape[3]), ("v", operands.v.shape[3])):
        if size % 8:
            return f"{name} has {size} features; Triton's kernels take multiples of 8"
    if 0 in operands.q.shape:
        return "an empty batch or sequence"
    if operands.gv is not None:
        return "decays of value features (gv)"
    from .configs import fits

    if not fits(operands, target):
        (d, e), dtype = (operands.q.shape[3], operands.v.shape[3]), operands.q.dtype
        return f"a state of {d} × {e} for {dtype} does not fit into the shared memory of {target}"
    return None


def _heuristic(operation: str, spec: RecurrenceSpec, operands: Operands, target: Target) -> KernelConfig:
    from .configs import heuristic

    return heuristic(operation, operands, spec, target)


def _space(operation: str, spec: RecurrenceSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    from .configs import space

    return space(operation, operands, spec, target)


def _decorated(operation: str):
    configured = configured_by(partial(_heuristic, operation), partial(_space, operation))
    return lambda implementation: supported_if(supports)(configured(emits(*_launch.CUSTOM_CALLS)(implementation)))


@_decorated("forward")
def recurrence(
    *operands: Array | None, spec: RecurrenceSpec = RecurrenceSpec(), config: KernelConfig = KernelConfig()
) -> Outputs:
    """o and the final state."""
    from . import forward, step

    run = step.recurrence if config.algorithm == "steps" else forward.recurrence
    return run(*operands, spec=spec, config=config)


@_decorated("tangent")
def recurrence_jvp(
    primals: Operands,
    outputs: Outputs,
    tangents: Operands,
    *,
    spec: RecurrenceSpec = RecurrenceSpec(),
    config: KernelConfig = KernelConfig(),
) -> Outputs:
    """The tangents of o and the final state; a tangent of None is zero."""
    from .tangent import recurrence_jvp

    return recurrence_jvp(primals, outputs, tangents, spec=spec, config=config)


@_decorated("backward")
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
    from .gradients import recurrence_bwd

    return recurrence_bwd(primals, outputs, cotangents, wrt=wrt, spec=spec, config=config)


def register(operation: str) -> None:
    """Registers the three as the implementation of an operation of this family."""
    for suffix, implementation in (("", recurrence), ("_jvp", recurrence_jvp), ("_bwd", recurrence_bwd)):
        kernel_registry.register(operation + suffix, Platform.TRITON, Backend.GPU, PRIORITY)(implementation)
