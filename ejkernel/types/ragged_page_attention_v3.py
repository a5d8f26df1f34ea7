"""The config of ragged_page_attention_v3."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedPageAttentionConfig(OperationConfig):
    """Tile sizes and splits of a step. `num_splits` of a call overrides that of its config.

    Attributes:
        queries_per_block: tokens of a tile, for implementations in which a tile has several sequences.
        pages_per_block: pages of each sequence in such a tile.
        keys_per_block: keys of a tile of a GPU, for sequences with few tokens.
        num_splits: the number of splits of the keys of such a sequence.
        num_warps: warps of a GPU program for such a sequence.
        num_stages: stages of the software pipeline.
    """

    queries_per_block: int = 64
    pages_per_block: int = 16
    keys_per_block: int = 64
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
