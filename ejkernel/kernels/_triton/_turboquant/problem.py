"""The format of a cache quantised by TurboQuant, as a compile-time constant of the kernel over it."""

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels._triton._paged import SMALLEST_TILE, power_of_two


@dataclass(frozen=True)
class Format:
    """How keys and values are stored and multiplied.

    Attributes:
        words: of four indices each, that a key or a value has: D / 4.
        signs: bytes of signs that a key has: e / 8.
        key_entries, value_entries: of the codebooks.
        dtype: of Triton, in which products are computed.
        precision: of these.
        ptx: whether entries and signs are made by instructions of PTX.
    """

    words: int
    signs: int
    key_entries: int
    value_entries: int
    dtype: Any
    precision: str
    ptx: bool


def widths(format: Format) -> dict[str, int]:
    """Words and bytes of signs of a tile."""
    of = lambda size: max(SMALLEST_TILE, power_of_two(size))
    return dict(WORDS=of(format.words), SIGNS=of(format.signs))
