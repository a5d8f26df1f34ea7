"""Tiles of any head dim in shared memory, as the parts that head_dims.py cuts them into.

Products with keys sum over the parts, and those with values have columns of their own for each. A part is stored row
after row, which is how TMA copies it, and how products read it in tiles of 8 rows: two views of the same memory.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .._launch import shared
from .head_dims import ROW_WIDTHS


class Tiles(NamedTuple):
    """Tiles in shared memory: two views of each part, for products and for TMA."""

    parts: tuple[Any, ...]
    copies: tuple[Any, ...]

    @property
    def columns(self) -> list[slice]:
        """The columns of the tile that each part has."""
        ends = list(itertools.accumulate(part.shape[-1] for part in self.parts))
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]

    @property
    def columns_of_sums(self) -> list[slice | None]:
        """The columns of an accumulator that belong to each part; None: all."""
        return [None] if len(self.parts) == 1 else self.columns

    def copied(self, features: int) -> list[pl.Slice]:
        """The features of an array that belong to each part, as TMA copies them: the last may end beyond the array."""
        return [
            pl.ds(_dynamic(part.start) if part.stop > features else part.start, part.stop - part.start)
            for part in self.columns
        ]


def views(leading: tuple[int, ...], parts: Sequence[slice], dtype: Any, widest: int = ROW_WIDTHS[-1]) -> tuple:
    """The scratch memory of tiles [*leading, features] of these parts, in rows of `widest` numbers of 16 bits at most.

    Both views, or one where there is one part.
    """
    of_parts = tuple(shared((*leading, part.stop - part.start), dtype, 2 * widest) for part in parts)
    if len(parts) == 1:
        return (of_parts,)
    rows = [plgpu.SwizzleTransform(part.shape[-1] * np.dtype(dtype).itemsize) for part in of_parts]
    return of_parts, tuple(plgpu.SMEM(x.shape, dtype, transforms=(row,)) for x, row in zip(of_parts, rows, strict=True))


def union(*views: Any) -> Any:
    """Scratch memory with all of these views of it."""
    return plgpu.RefUnion(*views) if len(views) > 1 else views


def tiles_of(refs: Any) -> Tiles:
    """In a kernel, from the refs of `union(*views(…))`."""
    parts, *copies = refs
    return Tiles(parts, *(copies or [parts]))


def load_parts(tiles: Tiles, stage: Any, source: Callable[[pl.Slice], Any], features: int, full: Any) -> None:
    """Starts the copies of all parts of a tile into a stage; each arrives at the full barrier.

    `source` has the array of some features.
    """
    for part, of_part in zip(tiles.copies, tiles.copied(features), strict=True):
        plgpu.copy_gmem_to_smem(source(of_part), part.at[stage], full)


def _dynamic(start: int) -> Any:
    """Pallas takes no slice that is known to end beyond an array; before JAX 0.12 it took one that begins at 0."""
    return lax.axis_index("block") * 0 + start
