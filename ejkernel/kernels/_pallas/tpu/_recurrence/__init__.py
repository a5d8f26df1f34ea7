"""The linear recurrence on TPU: Pallas kernels, compiled by Mosaic.

What stands here imports no Pallas; the kernels are imported when they are first needed.
"""

from jax import Array

from ejkernel.kernels._registry import configured_by, kernel_registry, supported_if
from ejkernel.primitives._recurrence import Operands, Outputs, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target

PRIORITY = 100
# Scalar memory of every chip since v4 is 1 MiB; the table of chunks leaves some to the compiler.
SMEM_BYTES = 768 * 1024
# (block_q, block_k), the likeliest first.
BY_HEAD, BY_FEATURE = ((128, 128), (256, 128), (64, 64)), ((64, 16), (128, 16))


def supports(spec: RecurrenceSpec, operands: Operands, target: Target) -> str | None:
    """Why no kernel can run on these operands (arrays or shapes), or None."""
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
        return "a single token, which fills no block"
    if (size := _table_bytes(operands)) > SMEM_BYTES:
        return f"the table of chunks takes {size} bytes; scalar memory has room for {SMEM_BYTES}"
    return None


def _table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call takes with the smallest chunks."""
    packed, sequences = (1, 1) if operands.spans is None else operands.spans.shape[:2]
    return 4 * packed * (operands.q.shape[1] // min(chunk for chunk, _ in BY_HEAD + BY_FEATURE) + sequences)


def heuristic(spec: RecurrenceSpec, operands: Operands, target: Target) -> KernelConfig:
    """The config for a call that was not tuned."""
    return space(spec, operands, target)[0]


def space(spec: RecurrenceSpec, operands: Operands, target: Target) -> list[KernelConfig]:
    """block_q is a chunk, at whose end a state is kept; block_k a block of it, short with decays by feature."""
    sizes = BY_HEAD if operands.gk is None and operands.gv is None else BY_FEATURE
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
