"""The config of multi_latent_page_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class MultiLatentPageAttentionConfig(OperationConfig):
    """Tile sizes and splits of a step. `num_splits` of a call overrides that of its config.

    Attributes:
        queries_per_block: tokens of a tile; on a GPU they are of one sequence.
        pages_per_block: pages of each sequence in a tile, for implementations whose tiles are whole pages.
        heads_per_block: heads of each token in a tile of a GPU.
        keys_per_block: keys of a tile of a GPU.
        num_splits: the number of splits of the keys of a sequence.
        num_warps: warps of a GPU program.
        num_stages: stages of the software pipeline.
        algorithm: a variant of the algorithm, where several exist: "transposed" in Triton.
    """

    queries_per_block: int = 64
    pages_per_block: int = 16
    heads_per_block: int = 64
    keys_per_block: int = 64
    num_splits: int = 1
    num_warps: int = 8
    num_stages: int = 2
    algorithm: str | None = None
