"""Calls of mean_pooling: chunks as block-sparse attention pools them, and texts as embedders do."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ._shape import TBYTES, Shape


@dataclass(frozen=True)
class MeanPoolingShape(Shape):
    """One call of mean_pooling on packed tokens.

    Attributes:
        name: what is pooled.
        tokens: tokens of all sequences.
        features: features of a token.
        sequences: the number of sequences.
        even: whether all sequences have the same length.
    """

    tokens: int
    features: int
    sequences: int
    even: bool = True

    convention: ClassVar[str] = "bytes: x read once forward, its gradient written once backward, in 16 bits"
    rivals: ClassVar[tuple[str, ...]] = ("jax.ops.segment_sum", "fla", "ejkernel before")
    modes: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd_bwd")

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of x and cu_seqlens."""
        return {"x": (self.tokens, self.features), "cu_seqlens": (self.sequences + 1,)}

    @property
    def dtypes(self) -> dict[str, str]:
        """cu_seqlens is int32."""
        return {"cu_seqlens": "int32"}

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The values of cu_seqlens."""
        return {"cu_seqlens": self.cu_seqlens(seed)}

    def work(self, mode: str) -> float:
        """Bytes of x for each pass over it."""
        return {"fwd": 1, "bwd": 1, "fwd_bwd": 2}[mode] * 2 * self.tokens * self.features

    def unit(self, mode: str) -> str:
        """TB/s: it is bound by memory."""
        del mode
        return TBYTES

    def cu_seqlens(self, seed: int = 0) -> np.ndarray:
        """cu_seqlens of all tokens; uneven lengths are random, and one of them is 0."""
        if self.even:
            return np.linspace(0, self.tokens, self.sequences + 1).astype(np.int32)
        cuts = np.sort(np.random.default_rng(seed).integers(0, self.tokens + 1, self.sequences - 1))
        cuts[0] = 0
        return np.array([0, *cuts, self.tokens], np.int32)

    def __str__(self) -> str:
        return f"{self.name}: t{self.tokens} d{self.features} n{self.sequences}" + " uneven" * (not self.even)


_CALLS = (
    # Keys of 8 sequences of 16384 tokens, 16 heads of 128 features, in chunks of 64
    MeanPoolingShape("chunks-64", 131072, 2048, 2048),
    # BAAI/bge-m3 (1024 features): texts of all lengths, and few long ones
    MeanPoolingShape("texts", 262144, 1024, 1024, even=False),
    MeanPoolingShape("long-texts", 262144, 1024, 8),
    MeanPoolingShape("one-text", 131072, 4096, 1),
)

SHAPES: dict[str, MeanPoolingShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
