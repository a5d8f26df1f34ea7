"""The config of ragged_decode_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedDecodeAttentionConfig(OperationConfig):
    """How a batch is divided. A call's own `num_splits` comes before that of its config.

    Attributes:
        queries_per_block: sequences that are computed at once, where each does not have programs of its own.
        keys_per_block: keys of a sequence that are computed at once.
        num_splits: into how many parts the keys of a sequence are cut.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
    """

    queries_per_block: int = 16
    keys_per_block: int = 256
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
