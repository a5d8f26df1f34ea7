"""Calls of multi_latent_page_attention: steps of decoding over pages of latents, of one token or a few drafts."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ._shape import TBYTES, Shape
from .page_attention import shuffled_pages


@dataclass(frozen=True)
class LatentPagesShape(Shape):
    """A step of decoding over latents.

    Attributes:
        sequences: of one context each.
        context: keys of a sequence.
        heads: of queries, which share the latents.
        tokens: new ones of a sequence.
        latent: features of a latent.
        rope: features of its rotary part.
        page: slots of a page.
    """

    sequences: int
    context: int
    heads: int
    tokens: int = 1
    latent: int = 512
    rope: int = 64
    page: int = 64

    convention: ClassVar[str] = "bytes: latents and rotary parts of all contexts, read once, in 16 bits"
    rivals: ClassVar[tuple[str, ...]] = ("FlashMLA",)
    modes: ClassVar[tuple[str, ...]] = ("fwd",)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The pool holds the pages of all sequences, and no others."""
        columns, tokens = self.context // self.page, self.sequences * self.tokens
        sizes = {"q_latent": (tokens, self.heads, self.latent), "q_rope": (tokens, self.heads, self.rope)}
        sizes |= {"pages": (self.sequences * columns, self.page, self.latent + self.rope)}
        sizes |= {"context_lens": (self.sequences,), "block_tables": (self.sequences, columns)}
        return sizes | {"query_start_loc": (self.sequences + 1,), "num_seqs": (1,)}

    @property
    def dtypes(self) -> dict[str, Any]:
        """Lengths and tables are int32."""
        return dict.fromkeys(("context_lens", "block_tables", "query_start_loc", "num_seqs"), "int32")

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """All contexts of one length, and tables of pages in random order."""
        return {
            "context_lens": np.full(self.sequences, self.context, np.int32),
            "block_tables": shuffled_pages(self.sizes["block_tables"], seed),
            "query_start_loc": np.arange(self.sequences + 1, dtype=np.int32) * self.tokens,
            "num_seqs": np.array([self.sequences], np.int32),
        }

    def work(self, mode: str) -> float:
        """Bytes of latents and rotary parts.

        A head makes 1.9 floating point operations of a byte: with 128 heads a TB/s is 242 TFLOP/s.
        """
        del mode
        return self.sequences * self.context * (self.latent + self.rope) * 2

    def unit(self, mode: str) -> str:
        """Memory is the bound."""
        del mode
        return TBYTES

    def __str__(self) -> str:
        sizes = f"h{self.heads} d{self.latent}+{self.rope} page {self.page}"
        return f"{self.name}: b{self.sequences} s{self.context} q{self.tokens} {sizes}"


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
)

SHAPES: dict[str, LatentPagesShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
