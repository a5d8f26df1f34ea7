"""The config of ragged_page_attention_v3."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedPageAttentionConfig(OperationConfig):
    """How much of a step is computed at once.

    Attributes:
        queries_per_block: tokens of the step.
        pages_per_block: pages of each of their sequences.
    """

    queries_per_block: int = 64
    pages_per_block: int = 16
