"""Calls of blocksparse_attention: causal layers that keep the diagonal blocks and a random fraction of those below."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import Shape


@dataclass(frozen=True)
class BlockSparseShape(Shape):
    """A causal layer with a block mask that differs between heads.

    Attributes:
        length: tokens of the sequence.
        share: the fraction of the blocks below the diagonal that is kept.
        heads: heads of queries, keys and values.
        head_dim: features of a head.
        block: tokens of a block.
    """

    length: int
    share: float
    heads: int = 16
    head_dim: int = 128
    block: int = 128

    convention: ClassVar[str] = (
        "forward 4·D FLOPs for each pair that is kept and causal, fwd_bwd 3.5 ×; of the dense, too"
    )
    rivals: ClassVar[tuple[str, ...]] = ("ejkernel, dense", "torch flex_attention")
    modes: ClassVar[tuple[str, ...]] = ("fwd", "fwd_bwd")

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """q, k and v of one sequence, and the mask."""
        blocks = self.length // self.block
        qkv = dict.fromkeys("qkv", (1, self.length, self.heads, self.head_dim))
        return qkv | {"block_mask": (self.heads, blocks, blocks)}

    @property
    def dtypes(self) -> dict[str, Any]:
        """The mask is bool."""
        return {"block_mask": "bool"}

    @property
    def options(self) -> dict[str, Any]:
        """Square blocks, and causality."""
        return {"block_size": (self.block, self.block), "causal": True}

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The block mask [heads, blocks, blocks]."""
        heads, blocks, _ = self.sizes["block_mask"]
        kept = np.random.default_rng(seed).random((heads, blocks, blocks)) < self.share
        return {"block_mask": np.tril(kept, -1) | np.eye(blocks, dtype=bool)}

    @property
    def pairs(self) -> int:
        """The number of visible pairs of a query and a key, in all heads."""
        diagonal = self.heads * (self.length // self.block)
        below = int(self.indices()["block_mask"].sum()) - diagonal
        return below * self.block**2 + diagonal * self.block * (self.block + 1) // 2

    def work(self, mode: str) -> float:
        """FLOPs of both products of the visible pairs; the backward counts 2.5 times that."""
        return {"fwd": 1.0, "fwd_bwd": 3.5}[mode] * self.pairs * 4 * self.head_dim

    def __str__(self) -> str:
        sizes = f"s{self.length} h{self.heads} d{self.head_dim}"
        return f"{self.name}: {sizes} blocks of {self.block}, {self.share:.0%} kept"


_CALLS = tuple(
    BlockSparseShape(f"{length // 1024}k-{share}%", length, share / 100)
    for length in (16384, 4096)
    for share in (10, 25, 50)
)

SHAPES: dict[str, BlockSparseShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
