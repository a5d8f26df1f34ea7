"""The random matrices of TurboQuant: a rotation, and a projection of which signs are kept (QJL, arXiv 2406.03482)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def generate_rotation_matrix(seed: int, head_dim: int) -> Array:
    """An orthogonal matrix [head_dim, head_dim] in float32, uniform among all of them, that the seed decides.

    It is Q of a matrix of normal numbers, with the signs that make the diagonal of R positive (Mezzadri, 2007).
    """
    normal = np.asarray(_normal(seed, (head_dim, head_dim)), np.float64)
    q, r = np.linalg.qr(normal)
    return jnp.asarray(q * np.where(np.diag(r) < 0, -1, 1), jnp.float32)


def generate_projection_matrix(seed: int, projection_dim: int, head_dim: int) -> Array:
    """A matrix [projection_dim, head_dim] in float32 of normal numbers of variance 1 / projection_dim."""
    return _normal(seed, (projection_dim, head_dim)) / np.float32(np.sqrt(projection_dim))


def _normal(seed: int, shape: tuple[int, int]) -> Array:
    """Also while a program is traced these are numbers, which it has as constants."""
    with jax.ensure_compile_time_eval():
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32)
