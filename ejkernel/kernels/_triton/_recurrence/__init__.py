"""The linear recurrence in Triton: chunks on tensor cores, and single tokens for decoding.

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, Platform, Target


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if reason := _launch.refusal(target):
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
    from .configs import fits

    if not fits(operands, target):
        (d, e), dtype = (operands.q.shape[3], operands.v.shape[3]), operands.q.dtype
        return f"a state of {d} × {e} for {dtype} does not fit into the shared memory of {target}"
    return None


_kernels = KernelTrio(
    __name__,
    "recurrence",
    RecurrenceSpec,
    Operands,
    Outputs,
    Platform.TRITON,
    Backend.GPU,
    priority=100,
    custom_calls=_launch.CUSTOM_CALLS,
    refuses=_launch.refuses,
    excess=_launch.excess,
)

recurrence = _kernels.forward("forward", supports, ("fused_chunks", "chunks", "steps"))
recurrence_jvp = _kernels.tangent("tangent", supports, ("chunks",))
recurrence_bwd = _kernels.backward("gradients", supports, ("chunks",))


def register(operation: str) -> None:
    """Registers the kernels for an operation that is a linear recurrence."""
    _kernels.register(operation, recurrence, recurrence_jvp, recurrence_bwd)
