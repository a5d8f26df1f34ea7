"""Calls of multi_latent_page_attention: steps of decoding over pages of latents, with one token or a few drafts.

Those with a list of keys for each token, as in DeepSeek-V3.2, include prefills.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import TBYTES, TFLOPS, Shape
from .page_attention import shuffled_pages


@dataclass(frozen=True)
class LatentPagesShape(Shape):
    """A step over latents.

    Attributes:
        sequences: the number of sequences.
        context: keys of a sequence.
        heads: query heads, which share the latents.
        tokens: new tokens of a sequence.
        latent: features of a latent.
        rope: features of its rotary part.
        page: slots of a page.
        top_k: keys in the list of a token; None without lists.
    """

    sequences: int
    context: int
    heads: int
    tokens: int = 1
    latent: int = 512
    rope: int = 64
    page: int = 64
    top_k: int | None = None

    convention: ClassVar[str] = (
        "bytes: latents and rotary parts of all contexts, read once, in 16 bits; "
        "FLOPs with lists: 2·T·H·top_k·(2·R + Dr), whether or not a token sees so many keys"
    )
    rivals: ClassVar[tuple[str, ...]] = ("FlashMLA",)
    modes: ClassVar[tuple[str, ...]] = ("fwd",)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays; the pool has no unused pages."""
        columns, tokens = self.context // self.page, self.sequences * self.tokens
        sizes = {"q_latent": (tokens, self.heads, self.latent), "q_rope": (tokens, self.heads, self.rope)}
        sizes |= {"pages": (self.sequences * columns, self.page, self.latent + self.rope)}
        sizes |= {"context_lens": (self.sequences,), "block_tables": (self.sequences, columns)}
        sizes |= {"query_start_loc": (self.sequences + 1,), "num_seqs": (1,)}
        return sizes if self.top_k is None else sizes | {"indices": (tokens, self.top_k)}

    @property
    def dtypes(self) -> dict[str, Any]:
        """Lengths, tables and lists are int32."""
        return dict.fromkeys(("context_lens", "block_tables", "query_start_loc", "num_seqs", "indices"), "int32")

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """All contexts of one length, tables of pages in random order, and lists of keys in random order."""
        lists = {} if self.top_k is None else {"indices": self.lists(seed)}
        return lists | {
            "context_lens": np.full(self.sequences, self.context, np.int32),
            "block_tables": shuffled_pages(self.sizes["block_tables"], seed),
            "query_start_loc": np.arange(self.sequences + 1, dtype=np.int32) * self.tokens,
            "num_seqs": np.array([self.sequences], np.int32),
        }

    def lists(self, seed: int = 0) -> np.ndarray:
        """[T, top_k]: random keys up to the token's own, each once, filled up with −1."""
        rng, first = np.random.default_rng(seed), self.context - self.tokens
        lists = np.full((self.sequences * self.tokens, self.top_k), -1, np.int32)
        for token, listed in enumerate(lists):
            keys = rng.permutation(first + token % self.tokens + 1)[: self.top_k]
            listed[: len(keys)] = keys
        return lists

    def work(self, mode: str) -> float:
        """Bytes of latents and rotary parts; with lists, FLOPs of both products.

        A head has 1.9 FLOPs for each byte: with 128 heads 1 TB/s is 242 TFLOP/s.
        """
        del mode
        if self.top_k is not None:
            return 2 * self.sequences * self.tokens * self.heads * self.top_k * (2 * self.latent + self.rope)
        return self.sequences * self.context * (self.latent + self.rope) * 2

    def unit(self, mode: str) -> str:
        """TB/s without lists; TFLOP/s with lists, which only the heads of one token share."""
        del mode
        return TBYTES if self.top_k is None else TFLOPS

    def __str__(self) -> str:
        sizes = f"h{self.heads} d{self.latent}+{self.rope} page {self.page}"
        lists = "" if self.top_k is None else f" top {self.top_k}"
        return f"{self.name}: b{self.sequences} s{self.context} q{self.tokens} {sizes}{lists}"


_CALLS = (
    LatentPagesShape("b128-4k-h16", 128, 4096, 16),
    LatentPagesShape("b128-4k-h64", 128, 4096, 64),
    LatentPagesShape("b128-4k-h128", 128, 4096, 128),
    LatentPagesShape("b32-16k-h16", 32, 16384, 16),
    LatentPagesShape("b32-16k-h128", 32, 16384, 128),
    LatentPagesShape("b1-32k-h16", 1, 32768, 16),
    LatentPagesShape("b1-32k-h128", 1, 32768, 128),
    LatentPagesShape("b128-4k-h16-q4", 128, 4096, 16, tokens=4),
    LatentPagesShape("b64-4k-h128-q2", 64, 4096, 128, tokens=2),
    LatentPagesShape("top2k-1k-of-32k-h128", 1, 32768, 128, tokens=1024, top_k=2048),
    LatentPagesShape("top2k-4k-of-32k-h128", 1, 32768, 128, tokens=4096, top_k=2048),
    LatentPagesShape("top2k-4k-of-32k-h16", 1, 32768, 16, tokens=4096, top_k=2048),
    LatentPagesShape("top2k-8k-of-8k-h128", 1, 8192, 128, tokens=8192, top_k=2048),
    LatentPagesShape("top2k-b128-32k-h128", 128, 32768, 128, top_k=2048),
    LatentPagesShape("top2k-b8-32k-h128", 8, 32768, 128, top_k=2048),
)

SHAPES: dict[str, LatentPagesShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
