"""TurboQuant, arXiv 2504.19874, in plain JAX: quantises keys and values to bytes, and dequantises them.

With Π an orthogonal matrix [d,d] and S a matrix [e,d] of independent normal numbers of variance 1/e:

    x = Π·k / ‖k‖,   c = the entries of the codebook that are nearest to x,   r = x − c,   s = sign(S·r)
    k̃ = ‖k‖ · Πᵀ(c + √(π/2e) · ‖r‖ · Sᵀs),   E⟨q, k̃⟩ = ⟨q, k⟩          (keys: c and s)
    ṽ = ‖v‖ · Πᵀc                                                        (values: c alone)

since E[sign(⟨σ, r⟩) · ⟨σ, y⟩] = √(2/πe) · ⟨r, y⟩ / ‖r‖ for each of the e rows σ of S. Indices of entries have four
bits, two in a byte, the first in the low half; signs have one bit, eight in a byte, the first in the lowest bit.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

MOST_ENTRIES = 16
"""The largest number of entries of a codebook, as indices have four bits."""


class Matrices(NamedTuple):
    """The constants of the quantisation: rotation Π [d,d], projection S [e,d], and codebooks of keys and of values."""

    rotation_matrix: Array
    qjl_projection: Array
    key_codebook: Array
    value_codebook: Array


class Quantised(NamedTuple):
    """Keys and values of any leading axes, as bytes and norms.

    Attributes:
        key_indices: [...,d/2] uint8, the indices of c.
        key_signs: [...,e/8] uint8, where s is not negative.
        key_norms: [...,2], ‖k‖ and ‖r‖.
        value_indices: [...,d/2] uint8.
        value_norms: [...], ‖v‖.
    """

    key_indices: Array
    key_signs: Array
    key_norms: Array
    value_indices: Array
    value_norms: Array


# --- Bits -------------------------------------------------------------------------------------------------------------


def pack_4bit(indices: Array) -> Array:
    """Numbers below 16 [...,d] in bytes [...,d/2]."""
    return _packed(indices, 4)


def unpack_4bit(packed: Array) -> Array:
    """The numbers [...,d] of bytes [...,d/2]."""
    return _unpacked(packed, 4)


def pack_signs(positive: Array) -> Array:
    """Bools, or numbers 0 and 1, [...,e] in bytes [...,e/8]."""
    return _packed(positive, 1)


def unpack_signs(packed: Array) -> Array:
    """1 and −1 in float32 [...,e] of bytes [...,e/8]."""
    return jnp.where(_unpacked(packed, 1) != 0, np.float32(1), np.float32(-1))


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)


def _packed(x: Array, bits: int) -> Array:
    shifts = _shifts(bits)
    parts = x.astype(jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] // len(shifts), len(shifts))
    shifts = shifts.reshape(*(1,) * x.ndim, -1)
    return jnp.sum(parts << jnp.broadcast_to(shifts, parts.shape), -1, dtype=jnp.uint8)


def _unpacked(x: Array, bits: int) -> Array:
    shifts = _shifts(bits)
    shape = (*x.shape, len(shifts))
    parts = jnp.broadcast_to(x[..., None], shape) >> jnp.broadcast_to(shifts.reshape(*(1,) * x.ndim, -1), shape)
    return (parts & np.uint8(2**bits - 1)).reshape(*x.shape[:-1], x.shape[-1] * len(shifts))


# --- Codebooks --------------------------------------------------------------------------------------------------------


def nearest(x: Array, codebook: Array) -> tuple[Array, Array]:
    """The uint8 index of the nearest entry for each number, the first of equally near ones, and that entry."""
    index, entry = jnp.zeros(x.shape, jnp.uint8), jnp.broadcast_to(codebook[0], x.shape)
    for n in range(1, codebook.shape[0]):
        is_nearer = jnp.abs(x - codebook[n]) < jnp.abs(x - entry)
        index, entry = jnp.where(is_nearer, np.uint8(n), index), jnp.where(is_nearer, codebook[n], entry)
    return index, entry


def entries(index: Array, codebook: Array) -> Array:
    """The entries of indices, the last entry for indices out of range; by a chain of selects instead of a gather."""
    found = jnp.broadcast_to(codebook[-1], index.shape)
    for n in range(codebook.shape[0] - 1):
        found = jnp.where(index == np.uint8(n), codebook[n], found)
    return found


# --- Keys and values --------------------------------------------------------------------------------------------------


def quantise_keys(k: Array, by: Matrices) -> tuple[Array, Array, Array]:
    """Bytes of indices and of signs, and both norms [...,2], of keys [...,d]; computed in the dtype of the matrices."""
    x, norm = _rotated_direction(k, by)
    index, c = nearest(x, by.key_codebook)
    r = x - c
    norms = jnp.stack([norm, jnp.sqrt(jnp.sum(r * r, -1))], -1)
    return pack_4bit(index), pack_signs(product(r, by.qjl_projection.T) >= 0), norms


def quantise_values(v: Array, by: Matrices) -> tuple[Array, Array]:
    """Bytes of indices, and norms [...], of values [...,d]."""
    x, norm = _rotated_direction(v, by)
    return pack_4bit(nearest(x, by.value_codebook)[0]), norm


def quantise(k: Array, v: Array, by: Matrices) -> Quantised:
    """Keys and values [...,d] in the format of a cache."""
    return Quantised(*quantise_keys(k, by), *quantise_values(v, by))


def rotated_keys(x: Quantised, by: Matrices) -> Array:
    """Keys [...,d+e] whose product with `rotated_queries` is ⟨q, k̃⟩: ‖k‖·c followed by ‖k‖·‖r‖·s."""
    dtype = by.key_codebook.dtype
    norm, of_residual = (x.key_norms[..., n, None].astype(dtype) for n in (0, 1))
    c, s = entries(unpack_4bit(x.key_indices), by.key_codebook), unpack_signs(x.key_signs).astype(dtype)
    return jnp.concatenate([norm * c, norm * of_residual * s], -1)


def rotated_queries(q: Array, by: Matrices) -> Array:
    """Queries [...,d+e] from queries [...,d]: Π·q followed by √(π/2e) · S·Π·q."""
    rotated = product(q.astype(by.rotation_matrix.dtype), by.rotation_matrix.T)
    return jnp.concatenate([rotated, sign_factor(by) * product(rotated, by.qjl_projection.T)], -1)


def rotated_values(x: Quantised, by: Matrices) -> Array:
    """Π·ṽ = ‖v‖·c [...,d]."""
    dtype = by.value_codebook.dtype
    return x.value_norms[..., None].astype(dtype) * entries(unpack_4bit(x.value_indices), by.value_codebook)


def dequantised_keys(x: Quantised, by: Matrices) -> Array:
    """k̃ [...,d]."""
    dim = by.rotation_matrix.shape[1]
    c, s = jnp.split(rotated_keys(x, by), [dim], -1)
    return product(c + sign_factor(by) * product(s, by.qjl_projection), by.rotation_matrix)


def dequantised_values(x: Quantised, by: Matrices) -> Array:
    """ṽ [...,d]."""
    return product(rotated_values(x, by), by.rotation_matrix)


def sign_factor(by: Matrices) -> Any:
    """√(π/2e) in the dtype of the projection."""
    return np.array(np.sqrt(np.pi / (2 * by.qjl_projection.shape[0])), by.qjl_projection.dtype)


def projection_of_rotated(by: Matrices, precision: str = "highest") -> Array:
    """√(π/2e) · S·Π [e,d], whose products with q and with signs are those of the projection."""
    return product(sign_factor(by) * by.qjl_projection, by.rotation_matrix, precision)


def product(x: Array, matrix: Array, precision: str = "highest") -> Array:
    """Rows [...,d] times a matrix [d,e], in full precision unless said."""
    return jnp.einsum("...d,de->...e", x, matrix, precision=precision)


def _rotated_direction(x: Array, by: Matrices) -> tuple[Array, Array]:
    """Π·x / ‖x‖, 0 where x is, and ‖x‖; the squares are those of x / max|x|, which neither overflow nor vanish."""
    x = x.astype(by.rotation_matrix.dtype)
    largest = jnp.max(jnp.abs(x), -1, keepdims=True)
    x = x / jnp.where(largest == 0, jnp.ones_like(largest), largest)
    norm = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    direction = x / jnp.where(norm == 0, jnp.ones_like(norm), norm)
    return product(direction, by.rotation_matrix.T), (largest * norm)[..., 0]
