"""The linear recurrence on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from ejkernel.kernels._tier import Tier
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, Platform, Target


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


_tier = Tier(__name__, "recurrence", RecurrenceSpec, Operands, Outputs, Platform.PALLAS, Backend.TPU, priority=100)

recurrence = _tier.forward("kernels", supports)
recurrence_jvp = _tier.tangent("kernels", supports)
recurrence_bwd = _tier.backward("kernels", supports)


def register(operation: str) -> None:
    """Registers them for an operation of this family."""
    _tier.register(operation, recurrence, recurrence_jvp, recurrence_bwd)
