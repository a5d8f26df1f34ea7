"""Calls of flash_mla: layers with multi-head latent attention in training, prefill, and with few queries."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..visible import visible_pairs
from ._shape import Shape


@dataclass(frozen=True)
class MlaShape(Shape):
    """One causal call of multi-head latent attention.

    Attributes:
        heads: query heads, each with keys and values of its own, projected from the latents.
        batch: sequences.
        seq_q: queries of a sequence, the last of its tokens.
        seq_k: keys of a sequence.
        latent: features of a latent.
        nope: features of a query and a key without rotary embedding.
        rope: features with it; these all heads of keys share.
        value_dim: features of a value.
    """

    heads: int
    batch: int
    seq_q: int
    seq_k: int
    latent: int = 512
    nope: int = 128
    rope: int = 64
    value_dim: int = 128

    convention: ClassVar[str] = (
        "FLOPs: forward 2·(D + V) for a visible pair and 2·R·(Dn + V) for a key, in each head, or less where queries "
        "attend to latents; bwd and jvp 2·(3·D + 2·V) and 6·R·(Dn + V), fwd_bwd with the forward"
    )
    rivals: ClassVar[tuple[str, ...]] = ("flash_attention of expanded arrays",)

    @property
    def modes(self) -> tuple[str, ...]:
        """Few queries are those of a decode, which has no derivatives."""
        return ("fwd", "bwd", "fwd_bwd", "jvp") if self.seq_q == self.seq_k else ("fwd",)

    def at(self, batch: int, seq: int) -> "MlaShape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq_q=seq, seq_k=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays."""
        sizes = {"q": (self.batch, self.seq_q, self.heads, self.nope + self.rope)}
        sizes |= {"kv_latent": (self.batch, self.seq_k, self.latent), "k_rope": (self.batch, self.seq_k, self.rope)}
        return sizes | {
            name: (self.latent, self.heads, n) for name, n in (("w_kc", self.nope), ("w_vc", self.value_dim))
        }

    @property
    def options(self) -> dict[str, Any]:
        """Every call is causal."""
        return {"causal": True}

    def work(self, mode: str) -> float:
        """FLOPs, the fewer of those with expanded keys and values and of those with queries projected to latents.

        Half a square counts where there are as many queries as keys. The backward computes the logits again.
        """
        pairs = visible_pairs(self.seq_q, self.seq_k, True, (None, None))
        pairs = self.seq_q * self.seq_k / 2 if self.seq_q == self.seq_k else pairs
        d, e, projected = self.nope + self.rope, self.value_dim, self.latent * (self.nope + self.value_dim)
        absorbed = pairs * (2 * self.latent + self.rope) + self.seq_q * projected
        fwd = min(pairs * (d + e) + self.seq_k * projected, absorbed)
        bwd = pairs * (3 * d + 2 * e) + 3 * self.seq_k * projected
        return 2.0 * self.batch * self.heads * {"fwd": fwd, "bwd": bwd, "fwd_bwd": fwd + bwd, "jvp": bwd}[mode]

    def __str__(self) -> str:
        seq = f"{self.seq_q}/{self.seq_k}" if self.seq_q != self.seq_k else f"{self.seq_q}"
        return (
            f"{self.name}: b{self.batch} s{seq} h{self.heads} d{self.latent}+{self.rope}→{self.nope}/{self.value_dim}"
        )


_CALLS = (
    # deepseek-ai/DeepSeek-V3: 128 heads, kv_lora_rank 512, qk_nope_head_dim 128, qk_rope_head_dim 64, v_head_dim 128
    MlaShape("deepseek-v3-mla", 128, 1, 4096, 4096),
    MlaShape("deepseek-v3-mla-4x4k", 128, 4, 4096, 4096),
    MlaShape("deepseek-v3-mla-16k", 128, 1, 16384, 16384),
    MlaShape("deepseek-v3-mla-1-of-32k", 128, 1, 1, 32768),
    MlaShape("deepseek-v3-mla-4-of-32k", 128, 1, 4, 32768),
    # deepseek-ai/DeepSeek-V2-Lite: 16 heads of the same sizes
    MlaShape("deepseek-v2-lite-mla", 16, 4, 4096, 4096),
)

SHAPES: dict[str, MlaShape] = {shape.name: shape for shape in _CALLS}
"""By name."""
