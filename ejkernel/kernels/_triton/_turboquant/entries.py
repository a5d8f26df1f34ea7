"""Tiles of a cache quantised by TurboQuant, as tensor cores multiply them: entries of a codebook, and signs.

Indices are read in words of sixteen bits, of which each has those of four features: a tile [K, D / 4] of words is four
tiles of entries, that of feature j of every word. A byte of signs is that of eight rows of the projection: [K, e / 8]
bytes are eight tiles. By PTX neither passes through memory on its way into a product, but for those of warpgroups.

By PTX the entries are looked up in registers. `prmt` picks four of eight bytes by four numbers of three bits each, and
the indices of a word are such numbers: so four entries of float16 are made of the lower bytes and the upper bytes, each
of two halves of the codebook of which the highest bit of an index picks one. A sign is a bit that stays where it is in
its byte, as the number bit · 2^(j − 24) of float16.
"""

import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array, lax

from ejkernel.xla_utils.turboquant import MOST_ENTRIES, Matrices

# The unit of float16's subnormal numbers, as which the bits of a byte are multiplied.
UNIT_OF_BITS = tl.constexpr(2.0**-24)


def codebooks_of(matrices: Matrices) -> Array:
    """The codebooks of keys and of values [b,2,16], the last entry of each repeated."""
    padded = lambda x: jnp.pad(x, ((0, 0), (0, MOST_ENTRIES - x.shape[1])), mode="edge")
    return jnp.stack([padded(matrices.key_codebook), padded(matrices.value_codebook)], 1)


def tables_of(codebooks: Array) -> Array:
    """Codebooks [b,2,16] float32 as PTX looks entries up: [b,2,9] int32, of which each has a table and a unit.

    Entries are float16 in that unit. Four numbers have the lower bytes of sixteen, four to a number, and four the upper
    ones; then there is the unit, a power of two, as the bits of a float32.
    """
    unit = unit_of(codebooks, -1)
    bits = lax.bitcast_convert_type((codebooks / unit).astype(jnp.float16), jnp.uint16).astype(jnp.uint32)
    bytes = jnp.stack([bits & 0xFF, bits >> 8], 2).reshape(*bits.shape[:2], 8, 4)
    words = (bytes << jnp.arange(0, 32, 8, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return jnp.concatenate([lax.bitcast_convert_type(a, jnp.int32) for a in (words, unit)], -1)


def unit_of(x: Array, axes: int | tuple[int, ...]) -> Array:
    """The power of two in which numbers fit float16: the greatest that is at most the largest of them, float32."""
    bits = lax.bitcast_convert_type(jnp.abs(x).max(axes, keepdims=True), jnp.int32)
    return lax.bitcast_convert_type(jnp.clip(bits & 0x7F800000, 0x00800000, 0x7E800000), jnp.float32)


@triton.jit
def load_codebook(codebooks, batch, number: tl.constexpr, format: tl.constexpr):
    """The unit of the entries of keys (0) or values (1), and where they are, or by PTX the numbers of their table."""
    if format.ptx:
        table = codebooks + (2 * batch + number) * 9
        unit = tl.load(table + 8).to(tl.float32, bitcast=True)
        return (
            unit,
            load_one(table),
            load_one(table + 1),
            load_one(table + 2),
            load_one(table + 3),
            load_one(table + 4),
            load_one(table + 5),
            load_one(table + 6),
            load_one(table + 7),
        )
    else:
        return tl.full([], 1.0, tl.float32), codebooks + (2 * batch + number) * 16


@triton.jit
def load_one(x):
    """A number as a tile [1, 1]. A scalar would keep the compiler from computing entries where they are multiplied."""
    return tl.load(x + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :])


@triton.jit
def entries_of(words, book, format: tl.constexpr, entries: tl.constexpr):
    """The entries of the four indices of each word, four tiles of the dtype of a product."""
    if format.ptx and entries <= 8:
        return entries_of_8_by_ptx(words, book)
    elif format.ptx:
        return entries_of_16_by_ptx(words, book)
    else:
        return (
            entry_of(words, 0, book, format),
            entry_of(words, 1, book, format),
            entry_of(words, 2, book, format),
            entry_of(words, 3, book, format),
        )


@triton.jit
def entry_of(words, j: tl.constexpr, book, format: tl.constexpr):
    """The entry of one index of each word."""
    return tl.load(book[1] + ((words.to(tl.int32) >> (4 * j)) & 15)).to(format.dtype)


@triton.jit
def entries_of_16_by_ptx(words, book):
    """Two words in an instruction; an index of eight or more picks from the second half."""
    _, low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3 = book
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 both, index, shifted, upper, low, high, other;
        prmt.b32 both, $4, 0, 0x3120;
        and.b32 index, both, 0x77777777;
        shl.b32 shifted, both, 4;
        prmt.b32 upper, shifted, both, 0xD9C8;
        prmt.b32 low, $5, $7, index;
        prmt.b32 other, $9, $11, index;
        lop3.b32 low, upper, other, low, 0xCA;
        prmt.b32 high, $13, $15, index;
        prmt.b32 other, $17, $19, index;
        lop3.b32 high, upper, other, high, 0xCA;
        prmt.b32 $0, low, high, 0x6240;
        prmt.b32 $1, low, high, 0x7351;
        shr.u32 index, index, 16;
        prmt.b32 upper, shifted, both, 0xFBEA;
        prmt.b32 low, $5, $7, index;
        prmt.b32 other, $9, $11, index;
        lop3.b32 low, upper, other, low, 0xCA;
        prmt.b32 high, $13, $15, index;
        prmt.b32 other, $17, $19, index;
        lop3.b32 high, upper, other, high, 0xCA;
        prmt.b32 $2, low, high, 0x6240;
        prmt.b32 $3, low, high, 0x7351;
        }""",
        "=&r,=&r,=&r,=&r,r" + ",r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def entries_of_8_by_ptx(words, book):
    """As for 16, of which an index past the end picks the eighth."""
    _, low_0, low_1, _, _, high_0, high_1, _, _ = book
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 both, index, past, low, high;
        prmt.b32 both, $4, 0, 0x3120;
        shr.u32 past, both, 3;
        and.b32 past, past, 0x11111111;
        mul.lo.u32 past, past, 7;
        lop3.b32 index, both, past, 0x77777777, 0xA8;
        prmt.b32 low, $5, $7, index;
        prmt.b32 high, $9, $11, index;
        prmt.b32 $0, low, high, 0x6240;
        prmt.b32 $1, low, high, 0x7351;
        shr.u32 index, index, 16;
        prmt.b32 low, $5, $7, index;
        prmt.b32 high, $9, $11, index;
        prmt.b32 $2, low, high, 0x6240;
        prmt.b32 $3, low, high, 0x7351;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [words, low_0, low_1, high_0, high_1],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def bits_of(bytes, format: tl.constexpr):
    """The eight bits of each byte, eight tiles: bit j as 2^j units of float16's subnormal numbers by PTX, else as 1."""
    if format.ptx:
        return bits_by_ptx(bytes)
    else:
        return (
            bit_of(bytes, 0, format),
            bit_of(bytes, 1, format),
            bit_of(bytes, 2, format),
            bit_of(bytes, 3, format),
            bit_of(bytes, 4, format),
            bit_of(bytes, 5, format),
            bit_of(bytes, 6, format),
            bit_of(bytes, 7, format),
        )


@triton.jit
def bit_of(bytes, j: tl.constexpr, format: tl.constexpr):
    """One of them."""
    return ((bytes >> j) & 1).to(format.dtype)


@triton.jit
def bits_by_ptx(bytes):
    """Four bytes in an instruction, which become two pairs of sixteen bits."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 first, second;
        prmt.b32 first, $16, 0, 0x4140;
        prmt.b32 second, $16, 0, 0x4342;
        and.b32 $0, first, 0x00010001;
        and.b32 $1, second, 0x00010001;
        and.b32 $2, first, 0x00020002;
        and.b32 $3, second, 0x00020002;
        and.b32 $4, first, 0x00040004;
        and.b32 $5, second, 0x00040004;
        and.b32 $6, first, 0x00080008;
        and.b32 $7, second, 0x00080008;
        and.b32 $8, first, 0x00100010;
        and.b32 $9, second, 0x00100010;
        and.b32 $10, first, 0x00200020;
        and.b32 $11, second, 0x00200020;
        and.b32 $12, first, 0x00400040;
        and.b32 $13, second, 0x00400040;
        and.b32 $14, first, 0x00800080;
        and.b32 $15, second, 0x00800080;
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [bytes],
        dtype=(tl.float16,) * 8,
        is_pure=True,
        pack=4,
    )
