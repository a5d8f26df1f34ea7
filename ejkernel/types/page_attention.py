"""The config of page_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class PageAttentionConfig(OperationConfig):
    """Tile sizes and splits of a step of decoding. `num_splits` of a call overrides that of its config.

    Attributes:
        keys_per_block: keys of a tile.
        queries_per_block: sequences of a tile, for implementations in which a tile has several.
        num_splits: the number of splits of the keys of a sequence.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
    """

    keys_per_block: int = 64
    queries_per_block: int = 16
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
