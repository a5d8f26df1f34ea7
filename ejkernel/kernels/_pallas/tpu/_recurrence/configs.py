"""The configs of the kernels of the linear recurrence.

chunk_size is the tokens of a chunk, whose initial state the forward keeps for the backward. subchunk_size is the tokens
of a block, the part of a chunk that is computed at once; it is small if decays vary by feature.
"""

from ejkernel.primitives._recurrence import Operands, RecurrenceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, subchunk_size), the most promising first.
BY_HEAD = ((128, 128), (256, 128), (64, 64))
BY_FEATURE = ((64, 16), (128, 16))


def space(operation: str, operands: Operands, spec: RecurrenceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    return [
        RecurrenceConfig(chunk_size=chunk, subchunk_size=block, platform=Platform.PALLAS, backend=Backend.TPU)
        for chunk, block in (BY_HEAD if operands.gk is None and operands.gv is None else BY_FEATURE)
    ]


def table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call needs with the smallest chunks."""
    packed, sequences = (1, 1) if operands.spans is None else operands.spans.shape[:2]
    return 4 * packed * (operands.q.shape[1] // min(chunk for chunk, _ in BY_HEAD + BY_FEATURE) + sequences)
