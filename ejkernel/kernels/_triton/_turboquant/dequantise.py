"""Keys and values of a cache quantised by TurboQuant, dequantised into a smaller cache of the dtype of queries.

With the entries c of Π·k / ‖k‖ and its signs s = 2 bits − 1, a row of keys or of values is

    k̃ = ‖k‖·(c·Π + ‖r‖·s·P),    P = √(π/2e)·S·Π,    s·P = 2·bits·P − the sum of all rows of P,    ṽ = ‖v‖·c·Π

Products are of float16: a matrix is scaled by a power of two.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from ejkernel.kernels._triton import _launch
from ejkernel.kernels._triton._paged.attend import page_and_slot, row_at
from ejkernel.kernels._triton._paged.problem import Problem
from ejkernel.types import KernelConfig
from ejkernel.xla_utils.turboquant import Matrices, Quantised, projection_of_rotated

from .entries import UNIT_OF_BITS, bits_of, entries_of, load_codebook, unit_of
from .problem import Format, widths
from .slots import load_norms, load_tile

FLOAT16_MAX = tl.constexpr(65504.0)
# Numbers of a part of Π that a program multiplies by: of more it spills registers.
MOST_OF_PART = 4096


class Owners(NamedTuple):
    """Whose keys the pages of a smaller cache have [b,c] int32: the sequence, N for none, and the first position."""

    sequence: Array
    position: Array


class _Products(NamedTuple):
    """What entries and bits are multiplied by: Π [b,4,D/4,D] and P [b,8,e/8,D] float16, in units [b,2] float32; and
    the sum of all rows of P [b,D] float32.

    Part j of Π has the rows of feature j of every word of four, and that of P the rows of bit j of every byte.
    """

    rotation: Array
    projection: Array
    offset: Array
    units: Array


def dequantised(
    of: Owners, page: int, *, x: Any, pools: Quantised, codebooks: Array, matrices: Matrices, problem: Problem,
    format: Format,
) -> Array:  # fmt: skip
    """Pages [b,c,page,g,2,d] in the dtype of q with the keys of `of`; what stands in the slots behind a context, and in
    the pages of no sequence, is undefined.
    """
    (batch, pages), sizes = of.sequence.shape, widths(format)
    columns = min(4 * sizes["WORDS"], MOST_OF_PART // sizes["WORDS"])
    by = jax.vmap(lambda by: _products(by, format, **sizes))(matrices)
    return _launch.launch(
        dequantise_kernel, *pools, codebooks, *by, x.context_lens, x.block_tables, *of,
        out_type=jax.ShapeDtypeStruct((batch, pages, page, problem.G, 2, problem.D), x.q.dtype),
        grid=batch * pages * problem.G * (4 * sizes["WORDS"] // columns),
        config=KernelConfig(num_warps=4, num_stages=1),
        problem=problem, format=format, PAGES=pages, SLOTS=page, COLUMNS=columns, **sizes,
    )  # fmt: skip


def _products(by: Matrices, format: Format, WORDS: int, SIGNS: int) -> _Products:
    projection = projection_of_rotated(by, "default")
    rotation, unit = _in_units(by.rotation_matrix, 4, WORDS, WORDS)
    bits, unit_of_bits = _in_units(projection, 8, SIGNS, WORDS)
    if format.ptx:  # bit j is 2^j units of float16's subnormal numbers
        bits = bits / (2.0 ** jnp.arange(8))[:, None, None]
        unit_of_bits = unit_of_bits / UNIT_OF_BITS.value
    offset = jnp.pad(projection.sum(0), (0, 4 * WORDS - projection.shape[1]))
    as_half = lambda a: a.astype(jnp.float16)
    return _Products(as_half(rotation), as_half(bits), offset, jnp.stack([unit, 2 * unit_of_bits]))


def _in_units(matrix: Array, parts: int, rows: int, words: int) -> tuple[Array, Array]:
    """Rows j, j + parts, … of a matrix as part j [parts,rows,4·words], 0 where there are none; and its unit."""
    unit = unit_of(matrix, (0, 1))
    by_part = (matrix / unit).reshape(-1, parts, matrix.shape[1]).swapaxes(0, 1)
    return jnp.pad(by_part, ((0, 0), (0, rows - by_part.shape[1]), (0, 4 * words - by_part.shape[2]))), unit[0, 0]


@triton.jit
def dequantise_kernel(
    key_indices, key_signs, key_norms, value_indices, value_norms, codebooks,
    rotation, projection, offset, units, context_lens, block_tables, sequences, positions, kv,
    problem: tl.constexpr, format: tl.constexpr, PAGES: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = 4 * WORDS // COLUMNS
    block, group = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % problem.G
    of_page = tl.program_id(0) // (BLOCKS * problem.G)
    batch = of_page // PAGES
    sequence, first = tl.load(sequences + of_page), tl.load(positions + of_page)
    if sequence == problem.N:
        return
    context = tl.minimum(tl.load(context_lens + batch * problem.N + sequence), problem.page * problem.columns)
    if first >= context:
        return
    slot = tl.arange(0, SLOTS)
    # A slot behind the context is not read: the last one in it is read instead.
    position = tl.minimum(first + slot, context - 1)
    page, at = page_and_slot(block_tables, batch, sequence, first // SLOTS, position, problem, SLOTS)
    strides: tl.constexpr = problem.k
    slots = row_at(strides, batch, page, at, group)
    norm, residual = load_norms(key_norms, slots)
    value_norm = tl.load(value_norms + slots).to(tl.float32)
    of_entries, of_bits = tl.load(units + 2 * batch), tl.load(units + 2 * batch + 1)
    feature = block * COLUMNS + tl.arange(0, COLUMNS)

    bits = bits_of(load_tile(key_signs, slots, format.signs, SIGNS, 1), format)
    signs = tl.dot(bits[0], part_of(projection, batch, 0, feature, 8, SIGNS, WORDS))
    for j in tl.static_range(1, 8):
        signs = tl.dot(bits[j], part_of(projection, batch, j, feature, 8, SIGNS, WORDS), signs)
    signs = signs * of_bits - tl.load(offset + batch * 4 * WORDS + feature)[None, :]
    row = (of_page.to(tl.int64) * SLOTS + slot) * problem.G + group
    to = kv + (row * 2 * problem.D)[:, None] + feature[None, :]
    exists = (feature < problem.D)[None, :]
    c = rotated_back(key_indices, 0, slots, codebooks, rotation, of_entries, batch, feature, format, WORDS)
    store(to, (c + signs * residual[:, None]) * norm[:, None], exists)
    c = rotated_back(value_indices, 1, slots, codebooks, rotation, of_entries, batch, feature, format, WORDS)
    store(to + problem.D, c * value_norm[:, None], exists)


@triton.jit
def rotated_back(
    indices, number: tl.constexpr, slots, codebooks, rotation, unit, batch, feature, format: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Features of c·Π for the entries c of keys (0) or values (1) in these slots."""
    book = load_codebook(codebooks, batch, number, format)
    words = load_tile(indices.to(tl.pointer_type(tl.int16), bitcast=True), slots, format.words, WORDS, 1)
    entries: tl.constexpr = format.key_entries if number == 0 else format.value_entries
    c = entries_of(words, book, format, entries)
    acc = tl.dot(c[0], part_of(rotation, batch, 0, feature, 4, WORDS, WORDS))
    for j in tl.static_range(1, 4):
        acc = tl.dot(c[j], part_of(rotation, batch, j, feature, 4, WORDS, WORDS), acc)
    return acc * (unit * book[0])


@triton.jit
def part_of(matrix, batch, j: tl.constexpr, column, PARTS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Columns of part j of a matrix."""
    row = (batch * PARTS + j) * ROWS + tl.arange(0, ROWS)
    return tl.load(matrix + row[:, None] * 4 * WORDS + column[None, :])


@triton.jit
def store(to, x, exists):
    """Numbers in the dtype of an array; what is beyond float16 becomes its largest number, as queries are no larger."""
    if to.dtype.element_ty == tl.float16:
        x = tl.where(x > FLOAT16_MAX, FLOAT16_MAX, tl.where(x < -FLOAT16_MAX, -FLOAT16_MAX, x))
    tl.store(to, x.to(to.dtype.element_ty), mask=exists)
