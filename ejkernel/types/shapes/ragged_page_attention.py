"""Calls of ragged_page_attention: prefills of new tokens after those in the cache, some with decodes in the step."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import Shape
from .page_attention import shuffled_pages


@dataclass(frozen=True)
class RaggedPageAttentionShape(Shape):
    """A step of a server.

    Attributes:
        sequences: the number of sequences in prefill.
        cached: keys of a sequence before the step.
        new: tokens of each of them in the step.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: features of queries, keys and values.
        page: slots of a page.
        decodes: further sequences, of `cached` keys and one new token.
    """

    sequences: int
    cached: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    page: int = 64
    decodes: int = 0

    convention: ClassVar[str] = "FLOPs: 4 · heads · features · Σ keys that each token sees"
    rivals: ClassVar[tuple[str, ...]] = ("FlashAttention-3",)
    modes: ClassVar[tuple[str, ...]] = ("fwd",)

    @property
    def context(self) -> int:
        """Keys of a sequence in prefill, after the step."""
        return self.cached + self.new

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return self.sequences * self.new + self.decodes

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays; the pool has no unused pages."""
        columns, sequences = -(-self.context // self.page), self.sequences + self.decodes
        pool = (sequences * columns, self.page, 2 * self.kv_heads, self.head_dim)
        sizes = {"q": (self.tokens, self.heads, self.head_dim), "kv_pages": pool, "context_lens": (sequences,)}
        return sizes | {"block_tables": (sequences, columns), "query_start_loc": (sequences + 1,), "num_seqs": (1,)}

    @property
    def dtypes(self) -> dict[str, Any]:
        """Lengths and tables are int32."""
        return dict.fromkeys(("context_lens", "block_tables", "query_start_loc", "num_seqs"), "int32")

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Prefills before decodes, and tables of pages in random order."""
        new = np.array([self.new] * self.sequences + [1] * self.decodes, np.int32)
        return {
            "context_lens": self.cached + new,
            "block_tables": shuffled_pages(self.sizes["block_tables"], seed),
            "query_start_loc": np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
            "num_seqs": np.array([len(new)], np.int32),
        }

    def work(self, mode: str) -> float:
        """FLOPs of both products of each token with the keys that it sees."""
        del mode
        visible = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * self.heads * self.head_dim * (self.sequences * visible + self.decodes * (self.cached + 1))

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.kv_heads} d{self.head_dim}"
        decodes = f", {self.decodes} {self.cached}+1" * bool(self.decodes)
        return f"{self.name}: b{self.sequences} {self.cached}+{self.new}{decodes} {heads} page {self.page}"


_CALLS = (
    RaggedPageAttentionShape("b8-4k-512", 8, 4096, 512, 32, 8),
    RaggedPageAttentionShape("b8-4k-512-page16", 8, 4096, 512, 32, 8, page=16),
    RaggedPageAttentionShape("b8-4k-512-page128", 8, 4096, 512, 32, 8, page=128),
    RaggedPageAttentionShape("b4-4k-512-b60-decode", 4, 4096, 512, 32, 8, decodes=60),
    RaggedPageAttentionShape("b16-8k-8", 16, 8192, 8, 32, 8, page=16),
    RaggedPageAttentionShape("b1-0-8k", 1, 0, 8192, 32, 8),
    RaggedPageAttentionShape("b4-16k-2k", 4, 16384, 2048, 32, 8),
    RaggedPageAttentionShape("b32-2k-128", 32, 2048, 128, 32, 8),
    RaggedPageAttentionShape("b64-1k-64", 64, 1024, 64, 32, 8),
    RaggedPageAttentionShape("b1-32k-256", 1, 32768, 256, 32, 8),
    RaggedPageAttentionShape("b8-4k-512-d64", 8, 4096, 512, 32, 8, 64),
    RaggedPageAttentionShape("b8-4k-512-d256", 8, 4096, 512, 16, 4, 256),
)

SHAPES: dict[str, RaggedPageAttentionShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
