"""Calls of gated_delta_rule taken from real models.

`shape.at(batch, length)` is the same layer at another size.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ._shape import Shape


@dataclass(frozen=True)
class GatedDeltaRuleShape(Shape):
    """One call of gated_delta_rule.

    Attributes:
        name: the model, and the length where there are several.
        batch: sequences.
        seq: tokens of a sequence.
        heads: heads of v, with a state each.
        qk_heads: heads of q and k, which heads of v share.
        key_dim: features of a query and a key.
        value_dim: features of a value.
    """

    batch: int
    seq: int
    heads: int
    qk_heads: int
    key_dim: int
    value_dim: int

    convention: ClassVar[str] = "FLOPs: forward 6·B·S·H·K·V, with its backward 11/3 times that"
    rivals: ClassVar[tuple[str, ...]] = ("fla",)
    modes: ClassVar[tuple[str, ...]] = ("fwd", "fwd_bwd")

    def at(self, batch: int, seq: int) -> "GatedDeltaRuleShape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v, beta and g."""
        tokens = (self.batch, self.seq)
        keys, values = (*tokens, self.qk_heads, self.key_dim), (*tokens, self.heads)
        return {"q": keys, "k": keys, "v": (*values, self.value_dim), "beta": values, "g": values}

    @property
    def dtypes(self) -> dict[str, str]:
        """The log decay is float32, as in the models."""
        return {"g": "float32"}

    def work(self, mode: str) -> float:
        """FLOPs: each token reads the state at its key, updates it and multiplies it by q.

        The backward recomputes the first two, and has two products for each of the three.
        """
        product = 2 * self.batch * self.seq * self.heads * self.key_dim * self.value_dim
        return {"fwd": 3, "fwd_bwd": 11}[mode] * product

    def __str__(self) -> str:
        heads = f"h{self.heads}/{self.qk_heads} d{self.key_dim}/{self.value_dim}"
        return f"{self.name}: b{self.batch} s{self.seq} {heads}"


_MODELS = (
    # Qwen/Qwen3-Next-80B-A3B-Instruct: linear_num_value_heads 32, linear_num_key_heads 16, heads of 128 features
    GatedDeltaRuleShape("qwen3-next-80b-linear", 4, 4096, 32, 16, 128, 128),
    GatedDeltaRuleShape("qwen3-next-80b-linear-16k", 1, 16384, 32, 16, 128, 128),
)

SHAPES: dict[str, GatedDeltaRuleShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
