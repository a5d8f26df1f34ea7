"""The layout of caches: pieces of pages are copied to vector memory unchanged, and rows of a head are loaded there.

A cache [pages, s, rows, features] has a row for each head of a slot: of keys, of values, or of both alternately. Rows
of 16 or 8 bits are packed, two or four to a word of 32 bits, as strided loads of the vector unit are of such words:

    word (slot · rows + row) // packing holds the features of a row from bit (row % packing) · 32 / packing on

Mosaic has no float16: such a cache is copied as bfloat16, and numbers are made of the bits.

If the rows of a slot do not fill registers, XLA keeps an array of this shape with the slots of a row side by side, and
the kernel takes it so, as [pages, rows, s, features]: a row is then loaded without a stride, whatever its features.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import is_by_rows

LANES = 128


@dataclass(frozen=True)
class Cache:
    """The sizes of a cache, and of a block of it in vector memory.

    Attributes:
        piece: slots of one copy, contiguous in a page.
        pieces: pieces of a block.
        rows: rows of a slot, one per head of keys or values.
        features: features of a row.
        dtype: the stored dtype.
        pieces_of_page: pieces of a page.
        pool: pieces of a pool if each batch element has its own; 0 if they share one.
    """

    piece: int
    pieces: int
    rows: int
    features: int
    dtype: Any
    pieces_of_page: int = 1
    pool: int = 0

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.piece * self.pieces

    @property
    def packing(self) -> int:
        """Rows in a word of 32 bits."""
        return 4 // np.dtype(self.dtype).itemsize

    @property
    def copied_as(self) -> Any:
        """The dtype as which the kernel has the cache."""
        return jnp.bfloat16 if self.dtype == jnp.float16 else self.dtype

    @property
    def by_rows(self) -> bool:
        """Whether the slots of a row are side by side, rather than the rows of a slot."""
        return is_by_rows(self.rows, self.features, self.dtype)

    @property
    def parts(self) -> list[slice]:
        """The features in parts of 128, the widest that a strided load takes; without strides they are one part."""
        if self.by_rows:
            return [slice(0, self.features)]
        return [slice(n, min(n + LANES, self.features)) for n in range(0, self.features, LANES)]

    @property
    def width(self) -> int:
        """Features of a part."""
        return self.parts[0].stop

    def stored(self, cache: jax.Array) -> jax.Array:
        """Pages [..., slots of a page, rows, features] cut into pieces [n,s,rows,·], or by rows [pages,rows,n,s,·]."""
        if self.by_rows:
            pages = cache.reshape(-1, self.pieces_of_page * self.piece, self.rows, self.features).swapaxes(1, 2)
            pieces = pages.reshape(-1, self.rows, self.pieces_of_page, self.piece, self.features)
        else:
            pieces = cache.reshape(-1, self.piece, self.rows, self.features)
        return lax.bitcast_convert_type(pieces, self.copied_as)

    def buffers(self, count: int) -> Any:
        """Vector memory for `count` blocks; the parts of the features are stored one after the other."""
        if self.by_rows:
            return pltpu.VMEM((count, self.rows, self.slots, self.features), self.copied_as)
        return pltpu.VMEM((count, len(self.parts), self.slots, self.rows, self.width), self.copied_as)

    def copies(self, stored: Any, buffer: Any, semaphore: Any, slot: Any, piece: Any, place: Any) -> Iterator[Any]:
        """The copies of a piece of the cache to its place in the block of a buffer."""
        slots = pl.ds(pl.multiple_of(place * self.piece, self.piece), self.piece)
        if self.by_rows:
            page, part = lax.div(piece, self.pieces_of_page), lax.rem(piece, self.pieces_of_page)
            yield pltpu.make_async_copy(stored.at[page, :, part], buffer.at[slot, :, slots], semaphore.at[slot])
            return
        for number, part in enumerate(self.parts):
            whole = len(self.parts) == 1
            features = pl.ds(part.start, part.stop - part.start)
            source = stored.at[piece] if whole else stored.at[(piece, *[slice(None)] * (stored.ndim - 2), features)]
            yield pltpu.make_async_copy(source, buffer.at[slot, number, slots], semaphore.at[slot])

    def loader(self, buffer: Any, slot: Any, visible: Any, dtype: Any) -> Callable[[int, int], jax.Array]:
        """Returns `load(row, part)` → [slots, width] in `dtype`: a part of one row of every slot of a block.

        It is 0 where `visible` [slots, 1] is false. Rows that are packed into one word are loaded once.
        """
        found = {}

        def load(row: int, part: int) -> jax.Array:
            if self.by_rows or self.packing == 1:
                if (row, part) not in found:
                    x = buffer[slot, row] if self.by_rows else self._strided(buffer.at[slot, part], row, 1)
                    found[row, part] = jnp.where(visible, x.astype(jnp.float32), 0).astype(dtype)
                return found[row, part]
            word, place = divmod(row, self.packing)
            if (word, part) not in found:
                words = self._strided(buffer.at[slot, part].bitcast(jnp.int32), word, self.packing)
                found[word, part] = jnp.where(visible, words, 0)
            return unpacked(found[word, part], place, self.dtype).astype(dtype)

        return load

    def _strided(self, view: Any, row: int, packing: int) -> jax.Array:
        """Row `row` of words of every slot, from a view [slots, rows of words, width]."""
        rows = self.rows // packing
        flat = view.reshape(self.slots * rows, view.shape[2])
        return flat[pl.ds(row, self.slots, stride=rows)] if rows > 1 else flat[...]


def unpacked(words: jax.Array, place: int, dtype: Any) -> jax.Array:
    """The values packed at index `place` in 32-bit words, as float32."""
    if dtype == jnp.bfloat16:
        return _float32(words << 16 if place == 0 else words & np.int32(-1 << 16))
    if dtype == jnp.float16:
        return _of_half(words >> (16 * place))
    signed = (words << (24 - 8 * place)) >> 24
    if dtype == jnp.int8:
        return signed.astype(jnp.float32)
    # float8_e4m3fn: 4 bits of exponent with bias 7, 3 bits of mantissa; subnormals are multiples of 2⁻⁹, and 127 is
    # NaN. Shifted by 20, the bits of the others are those of a float32 with an exponent less by 127 − 7 = 120.
    bits = signed & 127
    size = jnp.where(bits < 8, bits.astype(jnp.float32) * 2.0**-9, _float32(bits << 20) * 2.0**120)
    size = jnp.where(bits == 127, np.float32(np.nan), size)
    return jnp.where(signed < 0, -size, size)


def _of_half(words: jax.Array) -> jax.Array:
    """The float16 in the last 16 bits of words: 5 bits of exponent with bias 15, 10 bits of mantissa."""
    bits = words & 0x7FFF
    size = jnp.where(bits < 1024, bits.astype(jnp.float32) * 2.0**-24, _float32(bits << 13) * 2.0**112)
    size = jnp.where(bits < 0x7C00, size, jnp.where(bits == 0x7C00, np.float32(np.inf), np.float32(np.nan)))
    return jnp.where(words & 0x8000 != 0, -size, size)


def _float32(words: jax.Array) -> jax.Array:
    return pltpu.bitcast(words, jnp.float32)
