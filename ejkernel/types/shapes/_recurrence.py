"""Calls of operations over the linear recurrence: `shape.at(batch, length)` is the same layer at another size."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ._shape import TBYTES, TFLOPS, Shape


@dataclass(frozen=True)
class RecurrenceShape(Shape):
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

    operation: str
    heads: int
    key_dim: int
    value_dim: int
    batch: int = 8
    seq: int = 4096

    convention: ClassVar[str] = (
        "forward 4·B·S·H·K·V FLOPs; fwd_bwd 3.5 ×; step: 8·B·H·K·V bytes, of the bandwidth of a copy"
    )

    @property
    def rivals(self) -> tuple[str, ...]:
        """A kernel of flash-linear-attention, chunked or, for a single token, recurrent; and an earlier commit."""
        chunks, step = {
            "gla": ("fla chunk_gla", "fla fused_recurrent_gla"),
            "lightning_attention": ("fla chunk_simple_gla", "fla fused_recurrent_simple_gla"),
            "recurrent": ("fla chunk_retention", "fla fused_recurrent_retention"),
        }[self.operation]
        return (step if self.seq == 1 else chunks, "ejkernel before")

    @property
    def modes(self) -> tuple[str, ...]:
        """Forward, and forward with backward; a step of decoding for a single token."""
        return ("step",) if self.seq == 1 else ("fwd", "fwd_bwd")

    def at(self, batch: int, seq: int) -> "RecurrenceShape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of q, k, v and, for gla, of the gates."""
        rows = (self.batch, self.seq, self.heads)
        sizes = {"q": (*rows, self.key_dim), "k": (*rows, self.key_dim), "v": (*rows, self.value_dim)}
        return sizes | ({"gk": sizes["q"]} if self.operation == "gla" else {})

    @property
    def options(self) -> dict[str, Any]:
        """The static options of the operation."""
        return {"layer_idx": 0, "num_layers": 24} if self.operation == "lightning_attention" else {}

    def work(self, mode: str) -> float:
        """FLOPs: 4·B·S·H·K·V in the forward, as each token updates the state and multiplies it by q.

        Forward and backward count 3.5 times that: the state again, its cotangent, and the gradients of q, k and v. For
        a step it is bytes: the float32 state is read once and written once.
        """
        state = self.batch * self.heads * self.key_dim * self.value_dim
        return 8 * state if mode == "step" else {"fwd": 1.0, "fwd_bwd": 3.5}[mode] * 4 * state * self.seq

    def unit(self, mode: str) -> str:
        """TB/s for a step, which is bound by memory."""
        return TBYTES if mode == "step" else TFLOPS

    def __str__(self) -> str:
        dims = f"{self.key_dim}/{self.value_dim}" if self.key_dim != self.value_dim else f"{self.key_dim}"
        return f"{self.name}: b{self.batch} s{self.seq} h{self.heads} d{dims} {self.operation}"
