"""Calls of native_sparse_attention: the selected branch with given blocks, or two branches with their selection."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import Shape


@dataclass(frozen=True)
class NativeSparseShape(Shape):
    """A call with one sequence.

    Attributes:
        length: tokens of the sequence.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: features of a head.
        blocks: selected blocks of a query.
        size: tokens of a block.
        together: consecutive queries that have the same random blocks.
        whole: the compressed and the selected branch with the selection of blocks, instead of given blocks.
    """

    length: int
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    blocks: int = 16
    size: int = 64
    together: int = 1
    whole: bool = False

    convention: ClassVar[str] = (
        "FLOPs: 4·B·H·S·blocks·size·D forward, 2.5 times as many backward; causal masks are not deducted"
    )
    modes: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd_bwd")

    @property
    def rivals(self) -> tuple[str, ...]:
        """With the selection of blocks, dense causal attention too."""
        return ("fla", "dense flash_attention") if self.whole else ("fla",)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v, and of two gates or of block_indices."""
        q, kv = ((1, self.length, heads, self.head_dim) for heads in (self.heads, self.kv_heads))
        gates = dict.fromkeys(("g_cmp", "g_slc"), q[:3])
        return {"q": q, "k": kv, "v": kv} | (gates if self.whole else {"block_indices": (*kv[:3], self.blocks)})

    @property
    def dtypes(self) -> dict[str, Any]:
        """block_indices is int32."""
        return {"block_indices": "int32"}

    @property
    def options(self) -> dict[str, Any]:
        """The size of blocks and, if they are selected, their number."""
        return {"block_size": self.size} | ({"block_counts": self.blocks} if self.whole else {})

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """block_indices [1, S, G, blocks]: the own block, the first, random others in between, filled up with −1."""
        if self.whole:
            return {}
        rng, groups = np.random.default_rng(seed), self.kv_heads
        runs, total = -(-self.length // self.together), -(-self.length // self.size)
        rank = np.repeat(rng.random((runs, groups, total), np.float32), self.together, 0)[: self.length]
        own, block = np.arange(self.length)[:, None, None] // self.size, np.arange(total)
        rank = np.where(block == own, 3, np.where(block == 0, 2, rank))
        rank = np.where(block > own, -1, rank)
        count = min(self.blocks, total)
        best = np.argpartition(-rank, count - 1, axis=-1)[..., :count]
        lists = np.where(np.take_along_axis(rank, best, -1) < 0, -1, best).astype(np.int32)[None]
        return {"block_indices": np.pad(lists, [(0, 0)] * 3 + [(0, self.blocks - count)], constant_values=-1)}

    def work(self, mode: str) -> float:
        """FLOPs of both products with all selected keys."""
        forward = 4 * self.length * self.heads * self.blocks * self.size * self.head_dim
        return {"fwd": 1.0, "bwd": 2.5, "fwd_bwd": 3.5}[mode] * forward

    def __str__(self) -> str:
        lists = "whole" if self.whole else f"{self.blocks} of {self.size}, lists for {self.together}"
        return f"{self.name}: b1 s{self.length} h{self.heads}/{self.kv_heads} d{self.head_dim} {lists}"


_CALLS = (
    NativeSparseShape("8k", 8192),
    NativeSparseShape("16k", 16384),
    NativeSparseShape("16k-near", 16384, together=16),
    NativeSparseShape("64k", 65536),
    NativeSparseShape("16k-whole", 16384, whole=True),
    NativeSparseShape("64k-whole", 65536, whole=True),
)

SHAPES: dict[str, NativeSparseShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
