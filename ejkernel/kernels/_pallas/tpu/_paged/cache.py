"""The layout of caches: pieces of pages are copied to vector memory unchanged, and rows of a head are loaded there.

A cache [pieces, s, rows, features] has a row for each head of a slot: of keys, of values, or of both alternately. Rows
of 16 or 8 bits are packed, two or four to a word of 32 bits, as strided loads of the vector unit are of such words:

    word (slot · rows + row) // packing holds the features of a row from bit (row % packing) · 32 / packing on
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
    """

    piece: int
    pieces: int
    rows: int
    features: int
    dtype: Any

    @property
    def slots(self) -> int:
        """Slots of a block."""
        return self.piece * self.pieces

    @property
    def packing(self) -> int:
        """Rows in a word of 32 bits."""
        return 4 // np.dtype(self.dtype).itemsize

    @property
    def parts(self) -> list[slice]:
        """The features in parts of 128, the widest that a strided load takes; a single row per slot is one part."""
        if self.rows == 1:
            return [slice(0, self.features)]
        return [slice(n, min(n + LANES, self.features)) for n in range(0, self.features, LANES)]

    @property
    def width(self) -> int:
        """Features of a part."""
        return self.parts[0].stop

    def stored(self, cache: jax.Array) -> jax.Array:
        """Pages [..., slots of a page, rows, features] cut into pieces, without the axis of rows if that is 1."""
        rows = () if self.rows == 1 else (self.rows,)
        return cache.reshape(-1, self.piece, *rows, self.features)

    def buffers(self, count: int) -> Any:
        """Vector memory for `count` blocks; the parts of the features are stored one after the other."""
        rows = () if self.rows == 1 else (self.rows,)
        return pltpu.VMEM((count, len(self.parts), self.slots, *rows, self.width), self.dtype)

    def copies(self, stored: Any, buffer: Any, semaphore: Any, slot: Any, piece: Any, place: Any) -> Iterator[Any]:
        """The copies of a piece of the cache to its place in the block of a buffer."""
        slots = pl.ds(pl.multiple_of(place * self.piece, self.piece), self.piece)
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
            if self.rows == 1 or self.packing == 1:
                if (row, part) not in found:
                    x = buffer[slot, part] if self.rows == 1 else self._strided(buffer.at[slot, part], row, 1)
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
    signed = (words << (24 - 8 * place)) >> 24
    if dtype == jnp.int8:
        return signed.astype(jnp.float32)
    # float8_e4m3fn: 4 bits of exponent with bias 7, 3 bits of mantissa; subnormals are multiples of 2⁻⁹, and 127 is
    # NaN. Shifted by 20, the bits of the others are those of a float32 with an exponent less by 127 − 7 = 120.
    bits = signed & 127
    size = jnp.where(bits < 8, bits.astype(jnp.float32) * 2.0**-9, _float32(bits << 20) * 2.0**120)
    size = jnp.where(bits == 127, np.float32(np.nan), size)
    return jnp.where(signed < 0, -size, size)


def _float32(words: jax.Array) -> jax.Array:
    return pltpu.bitcast(words, jnp.float32)
