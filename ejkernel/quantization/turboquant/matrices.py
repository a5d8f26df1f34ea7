"""The random matrices of TurboQuant: a rotation, and a projection of which signs are kept (QJL, arXiv 2406.03482).

The seed alone decides on the numbers, so that a cache can be read by other processes: neither the generator that JAX is
configured to use nor its 64-bit mode matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._static import int_within


def generate_rotation_matrix(seed: int, head_dim: int) -> Array:
    """An orthogonal matrix [head_dim, head_dim] in float32, uniform among all of them, that the seed decides.

    It is Q of a matrix of normal numbers, with the signs that make the diagonal of R positive (Mezzadri, 2007).

    Args:
        seed: an int from 0 to 2**32 − 1.
        head_dim: features of the vectors, at least 1.

    Raises:
        TypeError, ValueError: an argument is no int, or out of range.
    """
    operation = "generate_rotation_matrix"
    head_dim = int_within(operation, "head_dim", head_dim, 1)
    normal = np.asarray(_normal(operation, seed, (head_dim, head_dim)), np.float64)
    q, r = np.linalg.qr(normal)
    return jnp.asarray(q * np.where(np.diag(r) < 0, -1, 1), jnp.float32)


def generate_projection_matrix(seed: int, projection_dim: int, head_dim: int) -> Array:
    """A matrix [projection_dim, head_dim] in float32 of normal numbers of variance 1 / projection_dim.

    Args:
        seed: an int from 0 to 2**32 − 1.
        projection_dim: rows, at least 1.
        head_dim: features of the vectors, at least 1.

    Raises:
        TypeError, ValueError: an argument is no int, or out of range.
    """
    operation = "generate_projection_matrix"
    named = dict(projection_dim=projection_dim, head_dim=head_dim)
    rows, columns = (int_within(operation, name, x, 1) for name, x in named.items())
    return _normal(operation, seed, (rows, columns)) / np.float32(np.sqrt(rows))


def _normal(operation: str, seed: int, shape: tuple[int, int]) -> Array:
    """Also while a program is traced these are numbers, which it has as constants."""
    seed = int_within(operation, "seed", seed, 0, 2**32 - 1)
    with jax.ensure_compile_time_eval(), jax.threefry_partitionable(True):
        return jax.random.normal(jax.random.key(seed, impl="threefry2x32"), shape, jnp.float32)
