"""Shapes of linear recurrences taken from real models, by name: what tests, tuning and benchmarks are about.

`shape.at(batch, length)` is the same layer at another size.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RecurrenceShape:
    """One call of an operation over the linear recurrence.

    Attributes:
        name: of the model.
        operation: "recurrent", "gla" or "lightning_attention".
        heads: of queries, keys and values.
        key_dim: features of a query and a key.
        value_dim: features of a value.
        batch: sequences.
        seq: tokens of a sequence.
    """

    name: str
    operation: str
    heads: int
    key_dim: int
    value_dim: int
    batch: int = 8
    seq: int = 4096

    def at(self, batch: int, seq: int) -> "RecurrenceShape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v and of the gate where the operation has one for each token."""
        rows = (self.batch, self.seq, self.heads)
        sizes = {"q": (*rows, self.key_dim), "k": (*rows, self.key_dim), "v": (*rows, self.value_dim)}
        return sizes | ({"gk": sizes["q"]} if self.operation == "gla" else {})

    @property
    def options(self) -> dict[str, Any]:
        """The static options of the operation."""
        return {"layer_idx": 0, "num_layers": 24} if self.operation == "lightning_attention" else {}

    def __str__(self) -> str:
        dims = f"{self.key_dim}/{self.value_dim}" if self.key_dim != self.value_dim else f"{self.key_dim}"
        return f"{self.name}: b{self.batch} s{self.seq} h{self.heads} d{dims} {self.operation}"


_MODELS = (
    # MiniMaxAI/MiniMax-Text-01: 64 heads of 128, seven of eight layers linear
    RecurrenceShape("minimax-text-01", "lightning_attention", 64, 128, 128, batch=2),
    # fla-hub/gla-1.3B-100B: hidden 2048 on 4 heads, expand_k 0.5, expand_v 1
    RecurrenceShape("gla-1.3b", "gla", 4, 256, 512),
    # No model: the squares that published tables of such kernels have in common
    RecurrenceShape("lightning-h16-d128", "lightning_attention", 16, 128, 128),
    RecurrenceShape("gla-h16-d128", "gla", 16, 128, 128),
    # No model: RetNet's decays, arXiv 2307.08621
    RecurrenceShape("retention-h16-d128", "recurrent", 16, 128, 128),
)

RECURRENCE_SHAPES: dict[str, RecurrenceShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
