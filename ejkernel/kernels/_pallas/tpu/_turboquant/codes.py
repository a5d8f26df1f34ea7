"""Bytes of indices and signs become numbers of bfloat16 in registers: rows of a matrix for the matrix unit.

An entry of a codebook is a sum of two or three numbers of bfloat16, each with a row of its own, and a word of 32 bits
holds two rows of a slot. So a table has two parts of an entry in one word, and a gather by index gives two rows; of
third parts, a word has those of two features. Gathers are from the eight sublanes of a register, which the vector unit
does as fast as it adds; from lanes it would take several times as long. A sign is bit 15 or 31 of a word whose other
bits are those of 1.

    word n of a slot has the indices of features 8n to 8n + 7, and the signs 32n to 32n + 31

What is made of a bit or an index of all words is one after the other; `code_order` and `sign_order` tell which features
and signs these are, and XLA takes the rows of the rotation and of the projection in these orders.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._pallas.tpu import SUBLANES

from .._paged import LANES

# The bits of two numbers 1 in bfloat16, and their bits of sign.
ONES, SIGNS = 0x3F803F80, np.int32(np.uint32(0x80008000).astype(np.int32))


# --- In XLA -----------------------------------------------------------------------------------------------------------


def split(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` arrays of bfloat16 whose sum is x, but for its last bits; XLA does not drop these roundings."""
    parts = []
    for _ in range(count):
        parts.append(lax.reduce_precision(x, 8, 7))
        x = x - parts[-1]
    return [part.astype(jnp.bfloat16) for part in parts]


def table_of(codebook: jax.Array, parts: int) -> jax.Array:
    """A codebook [k] as int32 [1 or 2,1 or 2,8,128]: words with two parts of entries, and with third ones if any.

    An entry is in all lanes of a sublane, the last one also in those past k.
    """
    count = SUBLANES if codebook.shape[0] <= SUBLANES else 2 * SUBLANES
    entries = codebook[np.minimum(np.arange(count), codebook.shape[0] - 1)].astype(jnp.float32)
    found = split(entries, parts)
    found += [jnp.zeros_like(found[0])] * (parts % 2)
    bits = lax.bitcast_convert_type(jnp.stack(found, -1).reshape(count, -1, 2), jnp.int32)
    tables = bits.T.reshape(bits.shape[1], count // SUBLANES, SUBLANES, 1)
    return jnp.broadcast_to(tables, (*tables.shape[:3], LANES))


def code_order(features: int, parts: int) -> np.ndarray:
    """The feature of each of the parts·d rows that `codes` gives."""
    pairs = np.arange(features).reshape(-1, 4, 2).transpose(1, 2, 0)  # [4,2,d/8]: both features of byte n of all words
    both = np.repeat(pairs[..., None], 2, -1).reshape(4, -1)
    return np.concatenate([both, pairs.swapaxes(1, 2).reshape(4, -1)][: parts - 1], 1).reshape(-1)


def sign_order(rows: int) -> np.ndarray:
    """The row of the projection of each sign, in the order in which `signs` gives them."""
    count = rows // 32
    shifts = _shifts(count)
    first, more, word, half = np.ogrid[0:16:shifts, :shifts, :count, :2]
    return (32 * word + first + more + 16 * half).reshape(-1)


def _shifts(words: int) -> int:
    """How often words are repeated, each time shifted by one more bit, to fill the sublanes of a register."""
    return max(1, SUBLANES // words)


# --- In the kernel ----------------------------------------------------------------------------------------------------


def codes(packed: jax.Array, table: jax.Array) -> jax.Array:
    """The parts of the entries of indices in bytes [d/2,128] uint8, bfloat16 [parts·d,128], by `table_of`'s table."""
    words = pltpu.bitcast(packed, jnp.int32)
    found = []
    for n in range(0, 8, 2):
        both = [lax.shift_right_logical(words, jnp.full_like(words, 4 * m)) & 15 for m in (n, n + 1)]
        found += [_gathered(table[0], index) for index in both]
        if len(table) > 1:
            low, high = (_gathered(table[1], index) for index in both)
            found.append(low | (high << 16))
    return jnp.concatenate([pltpu.bitcast(x, jnp.bfloat16) for x in found])


def _gathered(halves: jax.Array, index: jax.Array) -> jax.Array:
    """The words of indices [8·n,128] in a table [1 or 2,8,128]; the last for indices past its end."""
    registers = range(0, index.shape[0], SUBLANES)
    of = lambda half, at: jnp.concatenate(
        [jnp.take_along_axis(half, at[n : n + SUBLANES], axis=0, mode="promise_in_bounds") for n in registers]
    )
    if len(halves) == 1:
        return of(halves[0], jnp.minimum(index, SUBLANES - 1))
    low = index & (SUBLANES - 1)
    return jnp.where(index < SUBLANES, of(halves[0], low), of(halves[1], low))


def signs(packed: jax.Array) -> jax.Array:
    """1 and −1 for the bits of bytes [e/8,128] uint8, bfloat16 [e,128]."""
    words = ~pltpu.bitcast(packed, jnp.int32)
    shifts = _shifts(words.shape[0])
    words = jnp.concatenate([words >> n for n in range(shifts)])
    found = [((words << (15 - n)) & SIGNS) | ONES for n in range(0, 16, shifts)]
    return jnp.concatenate([pltpu.bitcast(x, jnp.bfloat16) for x in found])
