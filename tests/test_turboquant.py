"""TurboQuant (arXiv 2504.19874): codebooks, matrices, distortion close to its bounds, unbiased products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.lax import ragged_page_attention_v3_turboquant
from ejkernel.quantization.turboquant import (
    generate_projection_matrix,
    generate_rotation_matrix,
    solve_lloyd_max,
)
from ejkernel.xla_utils.turboquant import (
    Matrices,
    dequantised_keys,
    dequantised_values,
    entries,
    nearest,
    pack_4bit,
    pack_signs,
    quantise,
    unpack_4bit,
    unpack_signs,
)

DIM = 128


# --- Codebooks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", (2, 3, 8, 128, 576))
@pytest.mark.parametrize("bits", (1, 2, 3, 4, 8))
def test_entries_are_the_means_of_their_cells(bits, dim):
    """By a sum over a fine grid of angles whose sine is the coordinate."""
    book = solve_lloyd_max(bits=bits, dim=dim)
    c, b = book.centroids.astype(np.float64), book.boundaries.astype(np.float64)
    angle = (np.arange(200_000) + 0.5) / 200_000 * np.pi - np.pi / 2
    x, mass = np.sin(angle), np.cos(angle) ** (dim - 2)
    mass /= mass.sum()
    cell = np.searchsorted(b, x)
    of_cells = lambda weights: np.bincount(cell, weights, len(c))
    means = of_cells(mass * x) / of_cells(mass)
    np.testing.assert_allclose(c, means, atol=2e-2 * np.diff(c).min() + 2e-7)
    np.testing.assert_allclose(book.distortion, dim * (mass * (x - c[cell]) ** 2).sum(), rtol=1e-3)
    assert book.n_levels == 2**bits == len(b) + 1 and book.centroids.dtype == np.float32
    np.testing.assert_array_equal(c, -c[::-1])
    np.testing.assert_allclose(b, (c[1:] + c[:-1]) / 2, atol=1e-7)


def test_known_codebooks():
    """In three dimensions a coordinate is uniform; in many it is normal, with the codebook of Max, 1960."""
    for bits in range(1, 5):
        uniform = (np.arange(2**bits) + 0.5) / 2 ** (bits - 1) - 1
        np.testing.assert_allclose(solve_lloyd_max(bits=bits, dim=3).centroids, uniform, atol=1e-7)
    normal = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
    for bits, wanted in normal.items():
        found = solve_lloyd_max(bits=bits, dim=10**6).centroids[2 ** (bits - 1) :] * 1e3
        np.testing.assert_allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize(("bits", "of_the_paper"), [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_distortion_is_that_of_the_paper(bits, of_the_paper):
    """The paper gives these numbers, and the bounds 4^−b ≤ D ≤ √3·π/2 · 4^−b."""
    found = solve_lloyd_max(bits=bits, dim=4096).distortion
    assert abs(found - of_the_paper) < 0.06 * of_the_paper + 3e-3
    for dim in (16, 64, 128, 256):
        assert solve_lloyd_max(bits=bits, dim=dim).distortion * 4**bits <= np.sqrt(3) * np.pi / 2
    assert found >= 4.0**-bits


@pytest.mark.parametrize("wrong", (0, 9, True, 2.0, "2", [2], float("nan"), None), ids=str)
@pytest.mark.parametrize("name", ("bits", "dim"))
def test_wrong_codebooks_are_refused(name, wrong):
    if (name, wrong) != ("dim", 9):
        with pytest.raises((TypeError, ValueError), match=rf"solve_lloyd_max: {name} is .*; it must be an int"):
            solve_lloyd_max(**{"bits": 2, "dim": 8, name: wrong})


# --- Matrices and bytes -----------------------------------------------------------------------------------------------


def test_rotations_are_orthogonal_and_uniform():
    found = np.asarray(generate_rotation_matrix(seed=42, head_dim=DIM), np.float64)
    np.testing.assert_allclose(found @ found.T, np.eye(DIM), atol=1e-6)
    np.testing.assert_array_equal(found, generate_rotation_matrix(seed=42, head_dim=DIM))
    assert np.abs(found - generate_rotation_matrix(seed=43, head_dim=DIM)).max() > 0.1
    many = np.stack([generate_rotation_matrix(seed=seed, head_dim=4) for seed in range(200)])
    means, squares = many.mean(0), (many**2).mean(0)  # 0 and 1/4, with deviations of 1/28 and less
    assert np.abs(means).max() < 0.14 and np.abs(squares - 0.25).max() < 0.07


def test_projections_are_normal():
    found = np.asarray(generate_projection_matrix(seed=7, projection_dim=512, head_dim=DIM), np.float64)
    assert found.shape == (512, DIM) and abs(found.mean()) < 1e-3
    np.testing.assert_allclose(found.var(), 1 / 512, rtol=0.03)
    np.testing.assert_allclose((found**4).mean(), 3 / 512**2, rtol=0.05)
    with jax.enable_x64(True):
        assert generate_projection_matrix(seed=7, projection_dim=8, head_dim=8).dtype == jnp.float32


@pytest.mark.parametrize(
    "setting",
    (lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False), lambda: jax.enable_x64(True)),
    ids=("generator", "partitionable", "64 bits"),
)
def test_the_seed_alone_decides(setting):
    """Whatever another process, which reads the cache, has set JAX to."""
    of = lambda: (generate_rotation_matrix(2**32 - 1, 8), generate_projection_matrix(2**31, 16, 8))
    before = of()
    with setting():
        jax.tree.map(np.testing.assert_array_equal, before, of())


@pytest.mark.parametrize("wrong", (-1, 2.5, True, "a", None, 2**32), ids=str)
@pytest.mark.parametrize("name", ("seed", "head_dim", "projection_dim"))
def test_wrong_matrices_are_refused(name, wrong):
    """Seeds of more than 32 bits would be cut off, or not, by the 64-bit mode of JAX."""
    given = dict(seed=0, head_dim=8) | ({} if name == "seed" else dict(projection_dim=8)) | {name: wrong}
    generate = generate_rotation_matrix if name == "seed" else generate_projection_matrix
    if wrong != 2**32 or name == "seed":
        with pytest.raises((TypeError, ValueError), match=rf"{generate.__name__}: {name} is .*; it must be an int"):
            generate(**given)


def test_matrices_are_constants_of_a_program():
    of = lambda: (generate_rotation_matrix(seed=1, head_dim=8), generate_projection_matrix(1, 16, 8))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(of)(), of())


def test_bytes():
    """The first number has the lowest bits."""
    assert pack_4bit(jnp.array([1, 2, 15, 0])).tolist() == [33, 15]
    assert pack_signs(jnp.array([1, 0, 0, 1, 0, 0, 0, 1])).tolist() == [137]
    every = jnp.arange(256, dtype=jnp.uint8).reshape(2, 4, 32)
    np.testing.assert_array_equal(pack_4bit(unpack_4bit(every)), every)
    np.testing.assert_array_equal(pack_signs(unpack_signs(every) > 0), every)
    assert unpack_signs(every).dtype == jnp.float32 and pack_signs(every[..., :8] > 9).dtype == jnp.uint8


@pytest.mark.parametrize("count", (1, 2, 8, 16))
def test_the_nearest_entry(count):
    rng = np.random.default_rng(0)
    book, x = rng.standard_normal(count).astype(np.float32), rng.standard_normal((5, 40)).astype(np.float32)
    index, entry = nearest(jnp.asarray(x), jnp.asarray(book))
    np.testing.assert_array_equal(index, np.abs(x[..., None] - book).argmin(-1))
    np.testing.assert_array_equal(entry, book[index])
    np.testing.assert_array_equal(entries(index, jnp.asarray(book)), entry)
    past = entries(jnp.full((3,), 15, jnp.uint8), jnp.asarray(book))
    assert past.tolist() == [book[-1]] * 3


# --- Statistics -------------------------------------------------------------------------------------------------------


def matrices(bits, seed=0, rows=DIM, dim=DIM):
    books = (jnp.asarray(solve_lloyd_max(bits=b, dim=dim).centroids) for b in (bits - 1, bits))
    return Matrices(generate_rotation_matrix(seed, dim), generate_projection_matrix(seed + 500, rows, dim), *books)


def vectors(count, seed=0, dim=DIM):
    """Keys, and queries with nonzero products with them: neither is random with respect to the matrices."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((count, dim)) * rng.uniform(0.2, 5, dim) * rng.uniform(0.1, 10, (count, 1))
    q = 0.5 * k / np.linalg.norm(k, axis=1, keepdims=True) + rng.standard_normal((count, dim)) / dim**0.5
    return jnp.asarray(q, jnp.float32), jnp.asarray(k, jnp.float32)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_distortion_of_values(bits):
    """E‖v − ṽ‖² / ‖v‖² equals that of the codebook, though no coordinate of v is normal."""
    _, v = vectors(2000)
    by = matrices(bits)
    error = dequantised_values(quantise(v, v, by), by) - v
    found = np.mean(np.sum(np.square(error), -1) / np.sum(np.square(v), -1))
    np.testing.assert_allclose(found, solve_lloyd_max(bits=bits, dim=DIM).distortion, rtol=0.03)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_products_of_keys_have_no_bias(bits):
    """The mean of ⟨q, k̃⟩ over projections is ⟨q, k⟩, without signs (1 − D)·⟨q, k⟩; its variance is

    (π/2e) · ‖q‖²‖r‖² − ⟨q, r⟩²/e, slightly below the 0.56/d, 0.18/d and 0.047/d of the paper.
    """
    q, k = vectors(256)
    of, rows, trials = matrices(bits), DIM, 200

    def product(seed):
        projection = jax.random.normal(jax.random.key(seed), (rows, DIM)) / rows**0.5
        by = of._replace(qjl_projection=projection)
        return jnp.sum(q * dequantised_keys(quantise(k, k, by), by), -1)

    length = np.linalg.norm(k, axis=1)
    exact = np.sum(np.float64(q) * np.float64(k), 1) / length
    found = np.float64(jax.jit(lambda: jax.lax.map(product, jnp.arange(trials), batch_size=8))()) / length
    slope = lambda x: (x * exact).sum(-1) / (exact * exact).sum()
    deviation = slope(found).std() / trials**0.5
    assert abs(slope(found.mean(0)) - 1) < 4 * deviation < 0.2 * solve_lloyd_max(bits=bits - 1, dim=DIM).distortion

    by = of._replace(qjl_projection=jnp.zeros((rows, DIM)))
    without = np.float64(jnp.sum(q * dequantised_keys(quantise(k, k, by), by), -1)) / length
    distortion = solve_lloyd_max(bits=bits - 1, dim=DIM).distortion
    np.testing.assert_allclose(slope(without), 1 - distortion, atol=0.01)

    variance = (found.var(0) / np.sum(np.square(q), 1)).mean() * rows
    assert 0.9 < variance / (np.pi / 2 * distortion) < 1.03
    assert variance < {2: 0.6, 3: 0.2, 4: 0.06}[bits]


def test_logits_of_the_operation_have_no_bias():
    """For sequences of one token lse is the logit, softmax_scale · ⟨q, k̃⟩; averaged over many projections."""
    dim, count, trials, bits = 32, 64, 200, 2
    q, k = vectors(count, dim=dim)
    k = k / jnp.linalg.norm(k, axis=1, keepdims=True)
    one, by = jnp.arange(count, dtype=jnp.int32), matrices(bits, dim=dim, rows=dim)
    pool = lambda last, dtype=jnp.uint8: jnp.zeros((count, 8, 1, *last), dtype)
    pools = pool((dim // 2,)), pool((dim // 8,)), pool((2,), jnp.float32), pool((dim // 2,)), pool((), jnp.float32)
    tables = jnp.ones(count, jnp.int32), one[:, None], jnp.arange(count + 1, dtype=jnp.int32), count

    def logits(projection):
        mats = by._replace(qjl_projection=projection)
        new = k[:, None]
        return ragged_page_attention_v3_turboquant(
            q[:, None], new, new, *pools, *tables, *mats, softmax_scale=1.0, return_lse=True
        )[1][:, 0]

    projections = np.random.default_rng(0).standard_normal((trials, dim, dim)) / dim**0.5
    found = np.float64(jax.jit(lambda x: jax.lax.map(logits, x))(jnp.asarray(projections, jnp.float32)))
    exact = np.sum(np.float64(q) * np.float64(k), 1)
    slopes = (found * exact).sum(1) / (exact * exact).sum()
    assert abs(slopes.mean() - 1) < 4 * slopes.std() / trials**0.5 < 0.1
