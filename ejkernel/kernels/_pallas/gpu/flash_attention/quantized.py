"""The forward in e4m3: q, k, v and the weights rounded to eight bits, where `precision` allows it.

q and k are rotated first, each row by the same orthogonal matrix (incoherent processing, arXiv 2407.08608), which
leaves q·k as it is: (q R)·(k R) = q·k. A number that is much greater than the others of its row then has no product
alone, whose rounding would decide the logit. Each tile of queries has a scale, and each block of keys, of k and of v.
A kernel of its own rounds them (rounding.py).

q·kᵀ is summed in float16, for which q and k are small enough; its error is a small part of that of their rounding. So
logits take half of the registers, and the softmax computes two of them at once (`tiles.updated`). Row maxima are
rounded to integers, which float16 represents exactly in the range that matters.

The tensor cores take operands of eight bits only with the contracted axis innermost, so v is transposed. After q·kᵀ a
thread holds the weights of the keys 2c, 2c + 1, 8 + 2c and 9 + 2c of every 16 (c: its index among four), where the next
product expects those of 4c to 4c + 3. Since a sum may be taken in any order, the keys of v are permuted to match.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .tiles import Float16Limits, RescaleLimits

E4M3 = jnp.float8_e4m3fn
GREATEST = float(jnp.finfo(E4M3).max)
# Below it the factor of q·kᵀ changes no weight. It is never 0, as that of zeros and zeros would be: a hidden key, whose
# q·kᵀ is −∞, would be NaN.
LEAST_FACTOR = 2.0**-100
# As an exponent of two, the least that a block of v may be beside the greatest: weights of one of zeros still count.
LEAST = -60
# Weights are computed times 2⁴, so that the small ones are not lost: 448 is in range, and 2⁻⁹ the smallest number.
# Float16 has the whole numbers up to 2048, and 2⁻²⁴: a weight of 2⁻²⁰ in blocks where the greatest are 2⁻⁴.
LIMITS = RescaleLimits(
    p_scale_log2=4, rescale_threshold=4, row_sum_limit=GREATEST, float16=Float16Limits(maximum=2044.0, least=-4)
)


class Scales(NamedTuple):
    """queries [b, query heads, tiles], keys [b, heads, blocks]: the factors of a tile of q and of a block of k.

    values [b, heads]: the factor of what is summed over v. p_scales_log2 [b, heads, blocks]: log₂ of what p is scaled
    by. Where the numbers of a block of v are small beside those of others, its weights are as much smaller, so that all
    blocks may be added up.
    """

    queries: Array
    keys: Array
    p_scales_log2: Array
    values: Array


def hadamard_size(features: int) -> int:
    """n, the features that one Hadamard matrix mixes: the greatest power of two that divides them."""
    return features & -features


def rotation(features: int) -> np.ndarray:
    """M = diag(r)·H / n in each block of n features, with the Hadamard matrix H, (−1)^popcount(i & j): n·M·Mᵀ = 1.

    r is the sequence of Rudin and Shapiro, (−1)^popcount(i & i/2). H alone would put a row of equal numbers into one
    feature; r, whose own transform is flat where n is a power of four, spreads these, too. With M no number becomes
    greater than the greatest of its row was, and the entries ±1/n are exact in 16 bits.
    """
    n = hadamard_size(features)
    i = np.arange(n)
    signs, hadamard = ((-1.0) ** np.bitwise_count(bits) for bits in (i & i >> 1, i[:, None] & i))
    return np.kron(np.eye(features // n), signs[:, None] * hadamard / n)


def rotated(x: Array) -> Array:
    """x·M of q or k, [b, n, heads, features]: of both, n·(q·M)·(k·M) = q·k."""
    return x @ jnp.asarray(rotation(x.shape[-1]), x.dtype)


def greatest_of(features: int) -> tuple[float, float, float]:
    """The greatest magnitudes of q, k and v in e4m3 for which no dot product of a query and a key overflows float16."""
    q, half = 16.0, float(jnp.finfo(jnp.float16).max)
    step = 2.0 ** (math.floor(math.log2(half / (q * features))) - jnp.finfo(E4M3).nmant)
    return q, half / (q * features) // step * step, GREATEST


def scales_of(of_q: Array, of_k: Array, of_v: Array) -> Scales:
    """The `Scales` of a call, from those of its tiles and blocks."""
    greatest = of_v.max(axis=2)
    scales_log2 = jnp.round(jnp.log2(of_v / greatest[:, :, None]))
    return Scales(of_q, of_k, LIMITS.p_scale_log2 + jnp.maximum(scales_log2, LEAST), greatest)


def unit_of(greatest: Array, limit: float) -> Array:
    """The power of two in units of which the greatest number is `limit` at most, and more than a quarter of it."""
    unit = jnp.maximum(greatest * (1 / limit), jnp.finfo(jnp.float32).tiny)
    return jnp.exp2(jnp.round(jnp.log2(unit) + 0.5))


class Unit(NamedTuple):
    """The factor of q·kᵀ for a block of keys, and log₂ of the factor of its weights."""

    factor: Array | float
    p_scale_log2: Array | int


class Units(NamedTuple):
    """The scales of a work tile: that of its queries, and those of the blocks of one head of k and v."""

    queries: Array
    scales: Scales
    head: tuple[Array, Array]

    def of(self, block: Array) -> Unit:
        block_index = (*self.head, block)
        factor = jnp.maximum(self.queries * self.scales.keys[block_index], LEAST_FACTOR)
        return Unit(factor, self.scales.p_scales_log2[block_index])
