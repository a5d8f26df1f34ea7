"""The conversion of tiles of eight bits, executed as the assembly that it is, for the threads of a warpgroup."""

import ml_dtypes
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu._inline.conversion import conversion_in_ptx

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
