"""Calls of state_space_v2 taken from real models.

`shape.at(batch, length)` is the same layer at another size.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from ._shape import Shape


@dataclass(frozen=True)
class StateSpaceV2Shape(Shape):
    """One call of state_space_v2.

    Attributes:
        name: the model, and the length where there are several.
        batch: sequences.
        seq: tokens of a sequence.
        heads: heads of x, with a state each.
        head_dim: features of a head.
        groups: groups of B and C, which heads share.
        state: features of the state.
    """

    batch: int
    seq: int
    heads: int
    head_dim: int
    groups: int
    state: int

    convention: ClassVar[str] = "FLOPs: forward 4·B·S·H·P·N, with its backward 3.5 times that"
    rivals: ClassVar[tuple[str, ...]] = ("mamba_ssm",)
    modes: ClassVar[tuple[str, ...]] = ("fwd", "fwd_bwd")

    def at(self, batch: int, seq: int) -> "StateSpaceV2Shape":
        """The same layer on `batch` sequences of `seq` tokens."""
        return replace(self, batch=batch, seq=seq)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of x, A, B, C, D and dt."""
        tokens = (self.batch, self.seq)
        shared = (*tokens, self.groups, self.state)
        sizes = {"x": (*tokens, self.heads, self.head_dim), "A": (self.heads,), "B": shared, "C": shared}
        return sizes | {"D": (self.heads,), "dt": (*tokens, self.heads)}

    @property
    def dtypes(self) -> dict[str, str]:
        """A, D and dt are float32, as in the models."""
        return dict.fromkeys(("A", "D", "dt"), "float32")

    def work(self, mode: str) -> float:
        """FLOPs: each token updates the state and multiplies it by C; counted like those of gla."""
        forward = 4 * self.batch * self.seq * self.heads * self.head_dim * self.state
        return {"fwd": 1.0, "fwd_bwd": 3.5}[mode] * forward

    def __str__(self) -> str:
        sizes = f"h{self.heads} p{self.head_dim} g{self.groups} n{self.state}"
        return f"{self.name}: b{self.batch} s{self.seq} {sizes}"


# The sizes are those of `config.json` in each model's repository at huggingface.co.
_MODELS = (
    # state-spaces/mamba2-2.7b
    StateSpaceV2Shape("mamba2-2.7b", 8, 2048, 80, 64, 1, 128),
    StateSpaceV2Shape("mamba2-2.7b-16k", 1, 16384, 80, 64, 1, 128),
    # mistralai/Mamba-Codestral-7B-v0.1
    StateSpaceV2Shape("mamba-codestral-7b", 4, 4096, 128, 64, 8, 128),
)

SHAPES: dict[str, StateSpaceV2Shape] = {shape.name: shape for shape in _MODELS}
"""By name."""
