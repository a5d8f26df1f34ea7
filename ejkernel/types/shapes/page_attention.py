"""Calls of page_attention: steps of decoding, one query for each sequence, over pages in random order."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import TBYTES, Shape


@dataclass(frozen=True)
class PageAttentionShape(Shape):
    """A step of decoding.

    Attributes:
        sequences: the number of sequences.
        context: keys of a sequence.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: features of queries, keys and values.
        page: slots of a page.
    """

    sequences: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    page: int = 16

    convention: ClassVar[str] = "bytes: keys and values of all contexts, read once, in 16 bits"
    rivals: ClassVar[tuple[str, ...]] = ("FlashAttention-3",)
    modes: ClassVar[tuple[str, ...]] = ("fwd",)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays; the pool has no unused pages."""
        columns = self.context // self.page
        pool = (self.sequences * columns, self.page, self.kv_heads, self.head_dim)
        sizes = {"q": (self.sequences, self.heads, self.head_dim), "k_pages": pool, "v_pages": pool}
        return sizes | {"context_lens": (self.sequences,), "block_tables": (self.sequences, columns)}

    @property
    def dtypes(self) -> dict[str, Any]:
        """Lengths and tables are int32."""
        return dict.fromkeys(("context_lens", "block_tables"), "int32")

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """All contexts of one length, and tables of pages in random order."""
        return {
            "context_lens": np.full(self.sequences, self.context, np.int32),
            "block_tables": shuffled_pages(self.sizes["block_tables"], seed),
        }

    def work(self, mode: str) -> float:
        """Bytes of keys and values."""
        del mode
        return 2 * self.sequences * self.context * self.kv_heads * self.head_dim * 2

    def unit(self, mode: str) -> str:
        """TB/s: it is bound by memory."""
        del mode
        return TBYTES

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads} d{self.head_dim}"
        return f"{self.name}: b{self.sequences} s{self.context} {heads} page {self.page}"


def shuffled_pages(size: tuple[int, int], seed: int) -> np.ndarray:
    """Block tables [sequences, columns] with each page once, in random order."""
    pages = np.random.default_rng(seed).permutation(size[0] * size[1])
    return pages.astype(np.int32).reshape(size)


_CALLS = (
    PageAttentionShape("b128-8k", 128, 8192, 32, 8),
    PageAttentionShape("b32-4k", 32, 4096, 32, 8),
    PageAttentionShape("b16-8k", 16, 8192, 32, 8),
    PageAttentionShape("b8-32k", 8, 32768, 32, 8),
    PageAttentionShape("b64-2k", 64, 2048, 64, 8),
    PageAttentionShape("b4-32k", 4, 32768, 64, 8),
    PageAttentionShape("b1-1k", 1, 1024, 32, 4),
    PageAttentionShape("b1-32k", 1, 32768, 32, 4),
    PageAttentionShape("b1-128k", 1, 131072, 32, 4),
)

SHAPES: dict[str, PageAttentionShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
