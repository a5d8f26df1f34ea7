"""The linear recurrence in Triton: chunks on tensor cores, and single tokens for decoding.

Triton and jax-triton are imported only when a kernel is first needed.
"""

from ejkernel.kernels._triton import _launch
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Target
from ejkernel.types.recurrence import RecurrenceConfig


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    if reason := _launch.refusal(target) or _launch.dtype_refusal("q", operands.q):
        return reason
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


_kernels = _launch.trio(__name__, "recurrence", RecurrenceSpec, Operands, Outputs, RecurrenceConfig)

recurrence = _kernels.forward("forward", supports, ("fused_chunks", "chunks", "steps"))
recurrence_jvp = _kernels.tangent("tangent", supports, ("chunks",))
recurrence_bwd = _kernels.backward("gradients", supports, ("chunks",))


def register(operation: str) -> None:
    """Registers the kernels for an operation that is a linear recurrence."""
    _kernels.register(operation, recurrence, recurrence_jvp, recurrence_bwd)
