"""merge_attention, composed of JAX operations, without a primitive of its own."""

from collections.abc import Mapping
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...errors import value_error
from .._composed import composed
from ._arguments import array, on_one_mesh, require_dtype, static_bool

NAME = "merge_attention"


Output: TypeAlias = Float[Array, "batch q_len q_heads v_head_dim"] | Float[Array, "tokens q_heads v_head_dim"]
Lse: TypeAlias = Float[Array, "batch q_heads q_len"] | Float[Array, "q_heads tokens"] | Float[Array, "tokens q_heads"]


@composed
def merge_attention(
    o_a: Output, lse_a: Lse, o_b: Output, lse_b: Lse, *, heads_last: bool | None = None
) -> tuple[Output, Lse]:
    """Attention over the union of two disjoint sets of keys, from the attention over each of them.

        lse = log(exp(lse_a) + exp(lse_b)),   o = exp(lse_a − lse)·o_a + exp(lse_b − lse)·o_b

    It merges shared prefixes (cascades), the parts of a split cache, and the hops of a ring. A row that sees no key of
    a set has lse = −∞ there, and o of that set does not affect the result; if it sees no key of either set, o = 0 and
    lse = −∞. Sinks may be included in only one of the two. Differentiable in all four arrays, to any order. Computed in
    float32, or in float64 if lse is float64.

    Args:
        o_a: the attention over one set of keys, [B, S, H, V], or [T, H, V] of packed or paged tokens.
        lse_a: the logsumexp of its rows, as the operation returns it: [B, H, S] beside [B, S, H, V]; beside [T, H, V],
            [H, T] from flash_attention and [T, H] from the paged operations.
        o_b: the attention over the other set, as o_a.
        lse_b: the logsumexp of its rows, as lse_a.
        heads_last: whether lse is [T, H] rather than [H, T]. Required if the shapes are ambiguous, as for T = H.

    Returns:
        o in o_a's shape and dtype; lse in lse_a's shape, float32 (float64 if lse_a is float64).

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit; the message names operand, numbers and rule.

    FlashInfer, arXiv 2501.01005; ring attention, arXiv 2310.01889.
    """
    given = dict(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    given = {name: array(NAME, name, x) for name, x in given.items()}
    require_dtype(NAME, np.floating, "a float type", **given)
    last = _heads_last(heads_last, **given)
    o_a, lse_a, o_b, lse_b = on_one_mesh(given).values()
    dtype = np.promote_types(lse_a.dtype, np.float32)
    a, b = lse_a.astype(dtype), lse_b.astype(dtype)
    top = jnp.maximum(a, b)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, jnp.zeros((), dtype)))
    of_a, of_b = jnp.exp(a - top), jnp.exp(b - top)
    empty = of_a + of_b == 0
    total = jnp.where(empty, jnp.ones((), dtype), of_a + of_b)
    # lax.add, as `+` of jax 0.12 is under jit, whose transpose finds no mesh for values mapped over an Explicit axis.
    lse = jnp.where(empty, jnp.array(-np.inf, dtype), lax.add(top, lax.log(total)))

    def part(weight: Array, o: Array) -> Array:
        weight = weight / total
        weight = (weight if last else jnp.swapaxes(weight, -1, -2))[..., None]
        # o may be NaN for rows that see no key of the set, and 0·NaN = NaN.
        return weight * jnp.where(weight == 0, jnp.zeros((), dtype), o.astype(dtype))

    return (part(of_a, o_a) + part(of_b, o_b)).astype(o_a.dtype), lse


def _heads_last(told: bool | None, o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> bool:
    """Whether heads are the last axis of both lse; raises if the shapes of the arrays do not fit each other."""
    shown = dict(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    found = heads_are_last(NAME, told, shown)
    for name, x, other in (("o_b", o_b, o_a), ("lse_b", lse_b, lse_a)):
        if x.shape != other.shape or x.dtype != other.dtype:
            raise value_error(NAME, f"{name} must be as {name[:-1]}a in shape and dtype", **shown)
    return found


def heads_are_last(operation: str, told: bool | None, given: Mapping[str, Array]) -> bool:
    """Whether lse, the second array given, is [T, H] rather than [H, T]; raises if its shape does not fit o, the first.

    `told` is the caller's `heads_last`, None to infer it from the shapes.
    """
    told = None if told is None else static_bool(operation, "heads_last", told)
    (name, o), (name_of_lse, lse), *_ = given.items()
    if o.ndim not in (3, 4):
        raise value_error(operation, f"{name} has {o.ndim} axes; it must be [B, S, H, V] or [T, H, V]", **given)
    if told and o.ndim == 4:
        raise value_error(operation, f"heads_last is True but {name} is [B, S, H, V], whose lse is [B, H, S]", **given)
    tokens, heads = o.shape[-3:-1]
    fits = {False: (*o.shape[:-3], heads, tokens)}
    if o.ndim == 3:
        fits[True] = (tokens, heads)
    found = [last for last, shape in fits.items() if lse.shape == shape and told in (None, last)]
    if not found:
        wanted = " or ".join(str(list(shape)) for last, shape in fits.items() if told in (None, last))
        raise value_error(operation, f"{name_of_lse} must be {wanted}, a number for each row of {name}", **given)
    if len(found) > 1:
        raise value_error(operation, f"there are {heads} tokens and heads; heads_last must say how lse stands", **given)
    return found[0]
