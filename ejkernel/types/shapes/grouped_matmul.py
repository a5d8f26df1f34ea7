"""Calls of grouped_matmul taken from real mixtures of experts.

`shape.at(rows)` is the same layer for another number of rows; a token is a row for each expert that it is sent to.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ._shape import Shape


@dataclass(frozen=True)
class GroupedMatmulShape(Shape):
    """One call of grouped_matmul.

    Attributes:
        name: the model and the layer.
        rows: rows of lhs.
        features: contracted features.
        columns: columns of the result.
        groups: experts.
    """

    rows: int
    features: int
    columns: int
    groups: int

    convention: ClassVar[str] = "FLOPs: forward 2·rows·features·columns, backward twice that"
    rivals: ClassVar[tuple[str, ...]] = (
        "jax.lax.ragged_dot",
        "tokamax",
        "jax pallas mosaic",
        "torch._grouped_mm",
        "ejkernel before",
    )
    modes: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd_bwd")

    def at(self, rows: int) -> "GroupedMatmulShape":
        """The same layer with another number of rows."""
        return replace(self, rows=rows)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of lhs, rhs and group_sizes."""
        rhs = (self.groups, self.features, self.columns)
        return {"lhs": (self.rows, self.features), "rhs": rhs, "group_sizes": (self.groups,)}

    @property
    def dtypes(self) -> dict[str, str]:
        """Sizes are int32."""
        return {"group_sizes": "int32"}

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The sizes of the groups."""
        return {"group_sizes": self.group_sizes(seed)}

    def work(self, mode: str) -> float:
        """FLOPs of one product in the forward, and of two in the backward."""
        return {"fwd": 1.0, "bwd": 2.0, "fwd_bwd": 3.0}[mode] * 2 * self.rows * self.features * self.columns

    def group_sizes(self, seed: int = 0) -> np.ndarray:
        """Uneven sizes that add up to all rows, one of them 0, by a Dirichlet distribution."""
        rng = np.random.default_rng(seed)
        shares = rng.dirichlet(np.full(self.groups, 4.0))
        shares[self.groups // 3] = 0
        return rng.multinomial(self.rows, shares / shares.sum()).astype(np.int32)

    def __str__(self) -> str:
        return f"{self.name}: m{self.rows} k{self.features} n{self.columns} g{self.groups}"


# The sizes are those of `config.json` in each model's repository at huggingface.co (hidden_size, num_experts, and
# moe_intermediate_size or intermediate_size): the product of the gate or up projection, and of the down projection.
_MODELS = (
    # mistralai/Mixtral-8x7B-v0.1
    GroupedMatmulShape("mixtral-8x7b-up", 8192, 4096, 14336, 8),
    GroupedMatmulShape("mixtral-8x7b-down", 16384, 14336, 4096, 8),
    # deepseek-ai/DeepSeek-V3, and the share of a device that holds a quarter of the experts
    GroupedMatmulShape("deepseek-v3-up", 32768, 7168, 2048, 256),
    GroupedMatmulShape("deepseek-v3-down", 32768, 2048, 7168, 256),
    GroupedMatmulShape("deepseek-v3-up-quarter", 32768, 7168, 2048, 64),
    # Qwen/Qwen3-235B-A22B and Qwen/Qwen3-30B-A3B
    GroupedMatmulShape("qwen3-235b-up", 16384, 4096, 1536, 128),
    GroupedMatmulShape("qwen3-30b-up", 32768, 2048, 768, 128),
)

SHAPES: dict[str, GroupedMatmulShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
