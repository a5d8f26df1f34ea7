"""The config of ragged_decode_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedDecodeAttentionConfig(OperationConfig):
    """How much of a batch is computed at once.

    Attributes:
        queries_per_block: sequences, of which each has one query.
        keys_per_block: keys of each of them.
    """

    queries_per_block: int = 16
    keys_per_block: int = 256
