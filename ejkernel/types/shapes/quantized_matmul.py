"""Calls of quantized_matmul taken from real models: decoding steps, in which the weights are read for a few rows.

`shape.at(rows)` is the same layer for another number of rows.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ._shape import TBYTES, Shape


@dataclass(frozen=True)
class QuantizedMatmulShape(Shape):
    """One call of quantized_matmul with affine weights, whose groups are columns of the product.

    Attributes:
        name: the model and the layer.
        rows: rows of x.
        features: contracted features.
        columns: columns of the result.
        bits: bits of a code.
        group_size: codes of a group.
    """

    rows: int
    features: int
    columns: int
    bits: int = 4
    group_size: int = 64

    convention: ClassVar[str] = "bytes: codes, scales and zeros read once, the latter two in 16 bits"
    rivals: ClassVar[tuple[str, ...]] = ("dense weights",)
    modes: ClassVar[tuple[str, ...]] = ("fwd",)

    def at(self, rows: int) -> "QuantizedMatmulShape":
        """The same layer for another number of rows."""
        return replace(self, rows=rows)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of x, w, scales and zeros."""
        groups = (self.features, self.columns // self.group_size)
        words = (self.features, self.columns * self.bits // 32)
        return {"x": (self.rows, self.features), "w": words, "scales": groups, "zeros": groups}

    @property
    def dtypes(self) -> dict[str, str]:
        """Codes are packed in words of 32 bits."""
        return {"w": "uint32"}

    @property
    def options(self) -> dict[str, Any]:
        """The format of the weights."""
        return {"bits": self.bits, "group_size": self.group_size}

    def indices(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Random codes."""
        return {"w": np.random.default_rng(seed).integers(0, 2**32, self.sizes["w"], np.uint32)}

    def work(self, mode: str) -> float:
        """Bytes of the weights."""
        del mode
        return self.features * self.columns * (self.bits / 8 + 4 / self.group_size)

    def unit(self, mode: str) -> str:
        """TB/s: a few rows are bound by memory."""
        del mode
        return TBYTES

    def __str__(self) -> str:
        return f"{self.name}: m{self.rows} k{self.features} n{self.columns} {self.bits} bits of {self.group_size}"


# meta-llama/Meta-Llama-3-70B: hidden_size 8192, intermediate_size 28672. The codes of a layer are 117 MB, more than the
# L2 cache of an H200, so that calls that follow one another read them from memory, as decoding does.
_UP = tuple(QuantizedMatmulShape(f"llama3-70b-up-{rows}", rows, 8192, 28672) for rows in (1, 16, 64))
_MODELS = (
    *_UP,
    QuantizedMatmulShape("llama3-70b-down-16", 16, 28672, 8192),
    QuantizedMatmulShape("llama3-70b-up-16-8-bits", 16, 8192, 28672, bits=8),
)

SHAPES: dict[str, QuantizedMatmulShape] = {shape.name: shape for shape in _MODELS}
"""By name."""
