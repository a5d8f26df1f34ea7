"""The instructions of quantized_matmul for codes that become numbers in registers, executed in NumPy."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
from ejkernel.kernels._triton.quantized_matmul import fragments

from . import ptx

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("zero", ("of codes", "far below", "far above"))
@pytest.mark.parametrize("tiles", (1, 2))
@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_a_word(dtype, bits, tiles, zero):
    """16 features of a word for each of 8 lanes: the error is at most 2 times that of weights that are rounded."""
    of = DTYPES[dtype]
    problem = fragments.Problem(8 * tiles, 16, 256 // bits, bits, 32, dtype, 1, tiles, 1, 1, 1, False, True)
    per_word, count = 32 // bits, 32 // bits * 2 * tiles
    codes = RNG.integers(0, 2**bits, (16, 8, per_word))
    low, high = {"of codes": (0, 2**bits), "far below": (-900, -800), "far above": (800, 900)}[zero]
    scales = RNG.uniform(0.005, 0.05, (16, 8)).astype(of)
    zeros = RNG.uniform(low, high, (16, 8)).astype(of)
    x = RNG.standard_normal((8 * tiles, 16)).astype(of)

    g, t = np.arange(32) // 4, np.arange(32) % 4
    words = (codes << (bits * np.arange(per_word))).sum(2).astype(np.uint32)
    of_rows = [words[4 * t + r, g] for r in range(4)]
    pair = lambda a, n: _word(np.stack([a[4 * t + 2 * n, g], a[4 * t + 2 * n + 1, g]], 1))
    pairs_of_x = [_word(x[8 * q + g[:, None], (4 * t + 2 * n)[:, None] + [0, 1]]) for q in range(tiles) for n in (0, 1)]
    addends = [[np.zeros(32, np.uint32), np.zeros(32, np.uint32), pair(scales, n), pair(zeros, n)] for n in (0, 1)]
    for operands in addends:
        ptx.execute(fragments.addends_in_ptx(problem), operands)
    sums = [np.zeros(32) for _ in range(count)]
    before = [np.zeros(32) for _ in range(count)]
    of_pairs = [pair(scales, 0), pair(scales, 1), addends[0][0], addends[1][0]]
    ptx.execute(fragments.products_in_ptx(problem), [*sums, *of_rows, *of_pairs, *pairs_of_x, *before])
    lost = [[np.zeros(32) for _ in range(4)] for _ in range(tiles)]
    for q in range(tiles):
        a = [addends[0][1], addends[0][1], addends[1][1], addends[1][1]]
        text = fragments.mma(problem, "$0 $1 $2 $3", "$4 $5 $6 $7", "$8 $9", "$10 $11 $12 $13")
        ptx.execute(text, [*lost[q], *a, *pairs_of_x[2 * q : 2 * q + 2], *(np.zeros(32) for _ in range(4))])

    found = np.zeros((8 * tiles, 8, per_word))
    for q in range(tiles):
        for second in range(2):
            for code in range(per_word):
                found[8 * q + 2 * t + second, g, code] = sums[(2 * q + second) * per_word + code] + lost[q][second]
    exact = (codes - zeros.astype(np.float64)[:, :, None]) * scales.astype(np.float64)[:, :, None]
    product = lambda weights: np.einsum("mk,kgc->mgc", x.astype(np.float64), weights.astype(np.float64))
    error = lambda o: np.linalg.norm(o - product(exact))
    assert 0 < error(found) <= 2 * error(product(exact.astype(of)))


def _word(pairs):
    return np.ascontiguousarray(pairs).view(np.uint16).view(np.uint32).reshape(32)
