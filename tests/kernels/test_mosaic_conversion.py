"""Conversions of numbers in shared memory, executed as the assembly that they are, for the threads of a warpgroup."""

import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu._inline.conversion import conversion_in_ptx
from ejkernel.kernels._pallas.gpu._inline.converted_rows import InList, InPages, conversion_of_rows_in_ptx, loads_in_ptx
from ejkernel.kernels._pallas.gpu._inline.float16 import rows_to_float16_in_ptx

from . import ptx

THREADS = 128
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float8_e4m3fn", "int8", "bfloat16", "float16")}


def swizzled(tile):
    """The bytes of a tile of 16 bits in parts of 8 rows × 64 columns; eight numbers c of row r are at c xor r."""
    rows, columns = tile.shape
    chunks = tile.reshape(rows // 8, 8, columns // 64, 8, 8).transpose(0, 2, 1, 3, 4)
    place = np.arange(8)[None] ^ np.arange(8)[:, None]
    return np.take_along_axis(chunks, place[None, None, :, :, None], 3).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("rows, columns", [(128, 64), (128, 128), (64, 192), (64, 256)])
@pytest.mark.parametrize("source", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("target, scaled", [("bfloat16", False), ("bfloat16", True), ("float16", False)])
def test_all_numbers_of_eight_bits(target, scaled, source, rows, columns):
    """Exactly, NaN too, or times the scale of the row, rounded once."""
    rng, size = np.random.default_rng(0), rows * columns
    numbers = rng.permutation(np.arange(size) % 256).astype(np.uint8)
    scales = rng.standard_normal(rows).astype(np.float32)
    shared = np.concatenate([np.full(2 * size, 255, np.uint8), numbers, scales.view(np.uint8)])
    addresses = [np.full(THREADS, n, np.uint32) for n in (0, 2 * size, 3 * size)]
    with np.errstate(invalid="ignore"):
        ptx.execute(conversion_in_ptx(rows, columns, DTYPES[source], DTYPES[target], scaled), addresses, shared)
    wanted = numbers.view(DTYPES[source]).astype(np.float32).reshape(rows, columns)
    wanted = (wanted * scales[:, None] if scaled else wanted).astype(DTYPES[target])
    found = shared[: 2 * size].view(DTYPES[target]).astype(np.float32)
    np.testing.assert_array_equal(found, swizzled(wanted).view(DTYPES[target]).astype(np.float32))


@pytest.mark.parametrize("rows, slots", [(16, 4), (16, 2), (32, 1), (64, 1), (None, 32), (None, 64)])
@pytest.mark.parametrize("source", ("float8_e4m3fn", "int8"))
@pytest.mark.parametrize("target", ("bfloat16", "float16"))
@pytest.mark.parametrize("is_needed", (0, 1))
def test_rows_of_latents(target, source, rows, slots, is_needed):
    """Of pages, or of a list with entries that are no slots, to a tile of latents and one of rotary parts; twice."""
    rng, columns, count = np.random.default_rng(0), (512, 64), slots * (rows or 1)
    pool = rng.integers(0, 256, (512, sum(columns))).astype(np.uint8)
    full = lambda numbers: [np.full(THREADS, n, np.uint32) for n in numbers]
    words, starts = full([0] * (count * sum(columns) // THREADS // 4)), (0, 2 * count * columns[0])
    if rows:
        lists, device = None, pool.reshape(-1)
        found = rows * rng.permutation(512 // rows)[: 2 * slots].reshape(2, slots)
        given, of = [full(firsts) for firsts in found], InPages((0,) * slots, rows)
        chosen = (found[..., None] + np.arange(rows)).reshape(2, count)
    else:
        lists = np.where(rng.random((3, 2 * count)) < 0.3, -1, rng.integers(0, 512, (3, 2 * count))).astype(np.int32)
        device = np.concatenate([pool.reshape(-1), lists.reshape(-1).view(np.uint8)])
        given, of = [full((pool.size, 1, first)) for first in (0, count)], InList(lists, 0, 0)
        chosen = lists[1].reshape(2, count)
    with_zeros = np.concatenate([pool, np.zeros((1, sum(columns)), np.uint8)])
    ptx.execute(loads_in_ptx(columns, count, of), [*words, *full((0, 1)), *given[0]], device=device)
    text = conversion_of_rows_in_ptx(columns, count, of, DTYPES[source], DTYPES[target])
    for n in range(1 + is_needed):
        shared = np.full(2 * count * sum(columns), 255, np.uint8)
        ptx.execute(text, [*words, *words, *full((0, is_needed)), *given[1], *full(starts)], shared, device)
        with np.errstate(invalid="ignore"):
            wanted = with_zeros[chosen[n]].view(DTYPES[source]).astype(np.float32).astype(DTYPES[target])
        for start, tile in zip(starts, np.split(wanted, [columns[0]], axis=1), strict=True):
            found = shared[start:][: 2 * tile.size].view(DTYPES[target]).astype(np.float32)
            of_tile = swizzled(np.ascontiguousarray(tile)).view(DTYPES[target]).astype(np.float32)
            np.testing.assert_array_equal(found, of_tile)


def test_rows_of_bfloat16_become_float16():
    """Exactly, times a power of two, down to 2⁻³¹ of the greatest number of a row, of any size; ∞ and NaN stay."""
    rng, rows, parts = np.random.default_rng(0), 32, 9
    signs, size = rng.choice([-1, 1], (rows, 64 * parts)), 2.0 ** rng.uniform(-31, 0, (rows, 64 * parts))
    x = signs * size
    x[:, 11] = 1
    x *= 2.0 ** np.array([0, 15, 60, 120, -10, -60, -120, 1] * 4)[:, None]
    x[3, 7], x[5, 8:10], x[6], x[7] = np.inf, (-np.inf, np.nan), 0, np.nan
    x = x.astype(DTYPES["bfloat16"])
    of_parts = x.reshape(rows, parts, 64).transpose(1, 0, 2)
    shared = np.concatenate([np.ascontiguousarray(of_parts).reshape(-1).view(np.uint8), np.zeros(4 * rows, np.uint8)])
    starts = [2 * x.size, *(128 * rows * part for part in range(parts))]
    with np.errstate(invalid="ignore"):
        for first in (0, 16):
            text = rows_to_float16_in_ptx(parts, first)
            ptx.execute(text, [np.full(THREADS, start, np.uint32) for start in starts], shared)
    factors = shared[2 * x.size :].view(np.float32).astype(np.float64)
    found = shared[: 2 * x.size].view(np.float16).reshape(parts, rows, 64).transpose(1, 0, 2).reshape(x.shape)
    np.testing.assert_array_equal(found.astype(np.float64) * factors[:, None], x.astype(np.float64))
    greatest = np.where(np.isfinite(found), np.abs(found.astype(np.float64)), 0).max(axis=1)[[0, 1, 2, 3, 4, 5]]
    assert (greatest >= 2**14).all() and (greatest < 2**15).all()
