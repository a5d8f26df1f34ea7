"""The config of ragged_page_attention_v3."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedPageAttentionConfig(OperationConfig):
    """How a step is divided. A call's own `num_splits` comes before that of its config.

    Attributes:
        queries_per_block: tokens of the step that are computed at once, where sequences have no programs of their own.
        pages_per_block: pages of each of their sequences.
        keys_per_block: keys of a sequence that a GPU program computes at once, for sequences with few tokens.
        num_splits: into how many parts the keys of such a sequence are cut.
        num_warps: warps of such a program.
        num_stages: stages of the software pipeline.
    """

    queries_per_block: int = 64
    pages_per_block: int = 16
    keys_per_block: int = 64
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
