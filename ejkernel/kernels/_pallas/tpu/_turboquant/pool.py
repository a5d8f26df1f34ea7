"""The layout of a pool of bytes or norms: pieces of 128 slots, which are in lanes, are copied unchanged."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .._paged import LANES


def stored(pool: jax.Array) -> jax.Array:
    """Pages [b?,p,s,g,·] as [b·p,g,·,s], and norms of values [b?,p,s,g] as [b·p,g,s]: XLA moves nothing for it."""
    pages = pool.reshape(-1, *pool.shape[2:])
    return jnp.moveaxis(pages, 1, -1)


@dataclass(frozen=True)
class Pool:
    """The sizes of a pool, and of a block of it in vector memory.

    Attributes:
        pieces: pieces of a block.
        rows: the axes of a piece before its slots: heads, and bytes or norms of a head.
        dtype: the stored dtype.
        pieces_of_page: pieces of a page.
        pool: pieces of a pool if each batch element has its own; 0 if they share one.
    """

    pieces: int
    rows: tuple[int, ...]
    dtype: Any
    pieces_of_page: int = 1
    pool: int = 0
    piece: int = LANES

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.piece * self.pieces

    def buffers(self, count: int) -> Any:
        """Vector memory for `count` blocks."""
        return pltpu.VMEM((count, self.pieces, *self.rows, self.piece), self.dtype)

    def copies(self, stored: Any, buffer: Any, semaphore: Any, slot: Any, piece: Any, place: Any) -> Iterator[Any]:
        """The copy of a piece of the pool to its place in the block of a buffer."""
        source = stored.at[piece]
        if self.pieces_of_page > 1:
            page, part = lax.div(piece, self.pieces_of_page), lax.rem(piece, self.pieces_of_page)
            slots = pl.ds(pl.multiple_of(part * self.piece, self.piece), self.piece)
            source = stored.at[(page, *[slice(None)] * len(self.rows), slots)]
        yield pltpu.make_async_copy(source, buffer.at[slot, place], semaphore.at[slot])
