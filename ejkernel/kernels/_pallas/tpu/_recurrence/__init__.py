"""The linear recurrence on TPU: Pallas kernels, compiled by Mosaic.

Pallas is imported only when a kernel is first needed.
"""

from functools import partial

from ejkernel.kernels._kernel_trio import KernelTrio
from ejkernel.kernels._pallas.tpu import SMEM_BYTES, refuses
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
    from .configs import table_bytes

    if target.platform != "tpu":
        return f"Mosaic runs on tpu, not on {target.platform}"
    if operands.q.dtype.name not in ("bfloat16", "float32"):
        return f"q is {operands.q.dtype}; the kernels take bfloat16 and float32"
    features, values = operands.q.shape[3], operands.v.shape[3]
    if features > 256:
        return f"q has {features} features; the kernels take up to 256"
    if values > 256 and values % 128:
        return f"v has {values} features; of more than 256 the kernels take multiples of 128"
    if 0 in operands.q.shape or 0 in operands.v.shape:
        return "an empty batch or sequence"
    if operands.q.shape[1] == 1:
        return "a single token: the kernels compute chunks of several"
    if (size := table_bytes(operands)) > SMEM_BYTES:
        return f"the table of chunks takes {size} bytes; scalar memory holds {SMEM_BYTES}"
    return None


def trio(package: str, algorithm: str, spec: type, operands: type, outputs: type) -> KernelTrio:
    """The kernels on TPU of an algorithm whose chunks are computed as those of the linear recurrence are."""
    return KernelTrio(
        package,
        algorithm,
        spec,
        operands,
        outputs,
        Platform.PALLAS,
        Backend.TPU,
        priority=100,
        config=RecurrenceConfig,
        refuses=partial(refuses, blocks=("chunk_size", "subchunk_size")),
    )


_kernels = trio(__name__, "recurrence", RecurrenceSpec, Operands, Outputs)

recurrence = _kernels.forward("kernels", supports)
recurrence_jvp = _kernels.tangent("kernels", supports)
recurrence_bwd = _kernels.backward("kernels", supports)


def register(operation: str) -> None:
    """Registers the kernels for an operation that is a linear recurrence."""
    _kernels.register(operation, recurrence, recurrence_jvp, recurrence_bwd)
