"""The config of ragged_decode_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class RaggedDecodeAttentionConfig(OperationConfig):
    """Tile sizes and splits of a step of decoding. `num_splits` of a call overrides that of its config.

    Attributes:
        queries_per_block: sequences of a tile, for implementations in which a tile has several.
        keys_per_block: keys of a tile.
        num_splits: the number of splits of the keys of a sequence.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
    """

    queries_per_block: int = 16
    keys_per_block: int = 256
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
