"""The parts of grouped_matmul that the kernels of all accelerators leave to plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.primitives.grouped_matmul import Operands
from ejkernel.xla_utils.groups import group_bounds


def tangent(x: Operands, dx: Operands, multiply: Callable[[Operands, np.dtype], jax.Array], dtype: Any) -> jax.Array:
    """The tangent ȯ = (l̇hs · rhs + lhs · ṙhs) σ + (lhs · rhs) σ̇, and that of existing_out in rows of no group.

    `multiply` gives one of these products in a dtype. Several are added up in float32 where the sum is of float16: a
    term may be beyond 65504 where the sum is not. (The range of bfloat16 is that of float32.)
    """
    x, dtype = x._replace(existing_out=None), np.dtype(dtype)
    moved = [x._replace(**{name: t}) for name in ("lhs", "rhs", "rhs_scale") if (t := getattr(dx, name)) is not None]
    wide = np.dtype(np.float32) if len(moved) > 1 and dtype == np.float16 else dtype
    terms = [multiply(product, wide) for product in moved]
    if dx.existing_out is not None:
        terms.append(outside(dx.existing_out, x).astype(wide))
    return sum(terms[1:], terms[0]).astype(dtype)


def outside(a: jax.Array, x: Operands) -> jax.Array:
    """a [b, m, n] in rows of no group, 0 in those of groups."""
    bounds = group_bounds(x.group_sizes, x.group_offset, x.rhs.shape[1], a.shape[1])
    row = jnp.arange(a.shape[1])[None]
    is_outside = (row < bounds[:, :1]) | (row >= bounds[:, -1:])
    return jnp.where(is_outside[..., None], a, 0)


def scale_cotangent(x: Operands, do: jax.Array, matrices: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """dσ_g = Σ_k rhs_g ∘ Σ_i lhs_iᵀ · do_i, where `matrices` gives the latter sum [b?, e, k, n] in float32.

    `matrices` takes do in the dtype of lhs. As dσ is float32, a wider do is a sum of numbers in that dtype: of what it
    is rounded to, and in the same way of what rounding leaves, which is multiplied by a power of two before, since it
    may be too small for float16. So may do itself, or too large: it is divided by the power of two of its greatest
    number, and there is a second part for numbers far below that. (This is not computed by converting back and forth,
    which XLA may simplify to no conversion, so that nothing is left.)
    """
    limits, of_do, unit, unscaled = jnp.finfo(x.lhs.dtype), jnp.finfo(do.dtype), 1.0, 0
    bits, left = limits.nmant + 1, do
    parts = -(-(of_do.nmant + 1) // bits)
    if of_do.nexp > limits.nexp:
        unit, parts = _power_of_two(do - outside(do, x)), max(parts, 2)
        left = (do / unit).astype(do.dtype)
    for part in range(parts):
        rounded = jax.lax.reduce_precision(left, limits.nexp, limits.nmant)  # 0 if subnormal
        unscaled += unit * 2.0 ** (-bits * part) * matrices(rounded.astype(x.lhs.dtype))
        left = 2.0**bits * (left - rounded)
    bounds = group_bounds(x.group_sizes, x.group_offset, x.rhs.shape[1], x.lhs.shape[1])
    used = (bounds[:, 1:] > bounds[:, :-1]).any(0 if unscaled.shape[0] == 1 else (), keepdims=True)
    used = used.reshape(-1, x.rhs.shape[1], 1, 1)  # the matrix of an empty group may be NaN
    dscale = jnp.where(used, unscaled * x.rhs.astype(jnp.float32), 0).sum(2)
    axes = [axis for axis, size in enumerate(x.rhs_scale.shape) if size < dscale.shape[axis]]
    return dscale.sum(axes, keepdims=True)


def _power_of_two(x: jax.Array) -> jax.Array:
    """The power of two by which the greatest finite number of x is at least 1 and less than 2, in float32."""
    greatest = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(initial=0).astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.where(greatest > 0, greatest, 1.0))
    return jnp.ldexp(jnp.float32(1), jnp.clip(exponent - 1, -126, 127))


def scale_varies_alone(x: Operands) -> str | None:
    """Why the cotangent of rhs_scale does not follow from that of rhs, or None."""
    if x.rhs_scale is not None and x.rhs_scale.shape[0] > x.rhs.shape[0]:
        return "rhs_scale varies over a batch that shares rhs"
    return None
