"""The configs of the kernels of state_space_v1: chunk_size tokens of a chunk, at most block_v channels of a program."""

from ejkernel.primitives.state_space_v1 import Operands, StateSpaceSpec
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.recurrence import RecurrenceConfig

# (chunk_size, block_v), the most promising first.
CANDIDATES = ((128, 512), (256, 256), (128, 256), (128, 128))


def space(operation: str, operands: Operands, spec: StateSpaceSpec, target: Target) -> list[RecurrenceConfig]:
    """The configs worth measuring for a call (arrays or shapes), the most promising first."""
    del operation, spec, target
    return [
        RecurrenceConfig(chunk_size=chunk, block_v=channels, platform=Platform.PALLAS, backend=Backend.TPU)
        for chunk, channels in CANDIDATES
        if operands.x.shape[2] % channels == 0
    ]


def table_bytes(operands: Operands) -> int:
    """Bytes of scalar memory that a call needs with the smallest chunks."""
    packed, sequences = (1, 1) if operands.spans is None else operands.spans.shape[:2]
    return 4 * packed * (operands.x.shape[1] // min(chunk for chunk, _ in CANDIDATES) + sequences)
