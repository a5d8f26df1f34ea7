"""The config of the linear recurrences: gla, lightning_attention, recurrent, the state spaces and gated delta rules."""

from dataclasses import dataclass
from typing import ClassVar

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RecurrenceConfig(OperationConfig):
    """Chunks of tokens and blocks of the state, in the words of flash-linear-attention.

    Attributes:
        chunk_size: tokens of a chunk (BT).
        block_k: features of keys of a block of the state, its rows (BK).
        block_v: features of values of a block of the state, its columns (BV).
        subchunk_size: tokens of the part of a chunk that is computed at once (BC), in XLA and on TPUs.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
        algorithm: a variant of the algorithm, where several exist: "fused_chunks", "chunks" or "steps" in Triton.
    """

    chunk_size: int = 128
    block_k: int = 64
    block_v: int = 128
    subchunk_size: int = 128
    num_warps: int = 4
    num_stages: int = 2
    algorithm: str | None = None

    from_kernel_config: ClassVar = {
        "chunk_size": "block_q",
        "block_k": "block_d",
        "block_v": "block_k",
        "subchunk_size": "block_k",
        "num_warps": "num_warps",
        "num_stages": "num_stages",
        "algorithm": "algorithm",
    }
