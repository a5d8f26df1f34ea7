"""The configs of the kernels of mean_pooling: block_s tokens and block_d features of a tile."""

from ejkernel.primitives.mean_pooling import MeanPoolingSpec, Operands
from ejkernel.types import Backend, Platform, Target
from ejkernel.types.mean_pooling import MeanPoolingConfig

from .._work_list import WorkItem, most_work_items

WIDTHS = (1024, 512)


def space(operation: str, operands: Operands, spec: MeanPoolingSpec, target: Target) -> list[MeanPoolingConfig]:
    """Configs with tiles of about twice the tokens of an average segment, or of the requested chunk."""
    return [
        MeanPoolingConfig(block_s=_tokens(operands, spec), block_d=width, platform=Platform.PALLAS, backend=Backend.TPU)
        for width in WIDTHS
    ]


def table_bytes(operands: Operands, spec: MeanPoolingSpec) -> int:
    """Bytes of scalar memory that a call needs."""
    b, s, _ = operands.x.shape
    return 4 * len(WorkItem._fields) * b * most_work_items(s, _tokens(operands, spec), _segments(operands) + 2)


def _tokens(operands: Operands, spec: MeanPoolingSpec) -> int:
    length = spec.chunk_size or 2 * operands.x.shape[1] // max(1, _segments(operands))
    return min(1024, max(64, 1 << (length - 1).bit_length()))


def _segments(operands: Operands) -> int:
    return 1 if operands.segments is None else operands.segments.shape[1]
