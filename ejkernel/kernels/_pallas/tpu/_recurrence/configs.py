"""Which configs the kernels of the linear recurrence are run with.

block_q is the tokens of a chunk, of which the forward keeps the chunk state for the backward; block_k those of a block
of it that is computed at once, few where decays vary by feature.
"""

from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types import Backend, KernelConfig, Platform, Target

# (block_q, block_k), the likeliest first.
BY_HEAD = ((128, 128), (256, 128), (64, 64))
BY_FEATURE = ((64, 16), (128, 16))


def space(operation: str, operands: Operands, spec: RecurrenceSpec, target: Target) -> list[KernelConfig]:
    """The configs that may be best for a call (arrays or shapes), the likeliest first."""
    return [
        KernelConfig(block_q=chunk, block_k=block, platform=Platform.PALLAS, backend=Backend.TPU)
        for chunk, block in (BY_HEAD if operands.gk is None and operands.gv is None else BY_FEATURE)
    ]


def table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call takes with the smallest chunks."""
    packed, sequences = (1, 1) if operands.spans is None else operands.spans.shape[:2]
    return 4 * packed * (operands.q.shape[1] // min(chunk for chunk, _ in BY_HEAD + BY_FEATURE) + sequences)
