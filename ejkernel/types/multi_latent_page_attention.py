"""The config of multi_latent_page_attention."""

from dataclasses import dataclass

from .config import OperationConfig


@dataclass(frozen=True, repr=False)
class MultiLatentPageAttentionConfig(OperationConfig):
    """How a step is divided. A call's own `num_splits` comes before that of its config.

    Attributes:
        queries_per_block: tokens of the step that are computed at once; in a GPU program they are of one sequence.
        pages_per_block: pages of each of their sequences that are computed at once, where not so many keys are.
        heads_per_block: heads that a GPU program computes at once, of each of its tokens.
        keys_per_block: keys that a GPU program computes at once.
        num_splits: into how many parts the keys of a sequence are cut.
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
