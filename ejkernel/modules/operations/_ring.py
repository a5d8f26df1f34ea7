"""Ring attention: keys and values are passed around the devices, and each hop is a call of flash_attention.

The hops are unrolled: in a loop XLA sends once more than needed and overlaps less, and the parts differ between hops.

The forward merges the hops and holds only o and lse of the keys so far. It saves q, k, v, o, lse and a remainder alone,
of which `_ring_tangent.py` makes the derivatives of every order.

The remainder is what rounding has left. In 16 bits it is that of o, merged in float32, and only derivatives take it. In
wider dtypes it is that of lse: hops are merged by weights exp(lse), and an lse of 200 in float32 is rounded by 8e-6,
and the weights with it. There each call has a second one, a tangent along v = 1, which sums the weights of its keys by
the rounded lse: t = Σ_j exp(s_j − lse). So the exact lse is lse + log t, two numbers that are merged as such.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ._ring_hop import (
    Arrays,
    Ring,
    alike,
    columns_of,
    dropouts,
    flash,
    flash_tangent,
    keys_of,
    of_part,
    on_device,
    plan_of,
    q_begins,
    rows_from,
    sent,
    sinks_lse,
    with_rows_from,
    without_dropout,
)
from ._ring_layout import Part
from ._ring_tangent import tangent
from .merge_attention import merge_attention

# Features of the v of ones by which weights are summed, which every implementation takes.
ONES = 8

Rows = tuple[Array, ...]
"""o [b, s, h, e], lse [b, h, s], and a remainder in the shape of o or of lse if there is one."""


def ring(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o in q's dtype, and lse, from arrays that all vary over the same manual axes. Differentiable to any order.

    sinks are [1, heads, n], softmax_scale is a traced scalar; bias and mask have four axes.
    """
    arrays = _of_each_element(arrays)

    @jax.custom_jvp
    def attention(arrays):
        return _forward(call, arrays)[:2]

    @jax.custom_jvp
    def with_remainder(arrays):
        return _forward(call, arrays, with_remainder=True)

    def derivative(primals, tangents):
        (arrays,), (tangents,) = primals, tangents
        names = "o", "lse", "lse" if _is_wide(arrays["q"]) else "o"
        rows = zip(names, with_remainder(arrays), strict=True)
        o, lse, remainder = rows = tuple(checkpoint_name(x, f"ring_attention_{name}") for name, x in rows)
        moving = {name: x for name, x in tangents.items() if not _is_zero(x)}
        return rows, (*tangent(call, arrays, moving, o, lse, remainder), jnp.zeros_like(remainder))

    with_remainder.defjvp(derivative, symbolic_zeros=True)
    attention.defjvp(lambda *of: tuple(rows[:2] for rows in derivative(*of)), symbolic_zeros=True)
    return attention(arrays)


def _of_each_element(arrays: Arrays) -> Arrays:
    """Sinks [b, heads, n] and a scale [b, heads], whose cotangents the whole ring sums over the batch, not each hop."""
    of_heads = jnp.zeros_like(arrays["q"][:, 0, :, 0])  # whose batch and heads Explicit axes may split
    each = {"sinks": of_heads[..., None], "softmax_scale": of_heads}
    return arrays | {name: arrays[name] + x.astype(arrays[name].dtype) for name, x in each.items() if name in arrays}


# --- Forward ---------------------------------------------------------------------------------------------------------


def _forward(call: Ring, arrays: Arrays, *, with_remainder: bool = False) -> Rows:
    """The rows merged over the hops; the keys of the next hop are sent before this one is computed.

    The first o stays in its own dtype, in which its hop rounds it anyway, and the last is rounded where it is merged:
    only between hops is o in the dtype of statistics, which doubles what it takes to read and write.
    """
    q, v = arrays["q"], arrays["v"]
    wide = _statistics_dtype(q)
    # Made from q, whose batch and heads Explicit axes may split.
    o = jnp.broadcast_to(jnp.zeros_like(q[..., :1]), (*q.shape[:3], v.shape[3]))
    lse = jnp.full_like(q[..., 0], -jnp.inf, wide).swapaxes(1, 2)
    rows = tuple(alike(arrays, o, lse, *([jnp.zeros_like(lse)] if _is_wide(q) else [])))
    travelling = keys_of(arrays)
    plan = plan_of(call, arrays)
    for n, (hop, of_devices) in enumerate(plan):
        here = {**arrays, **travelling, **columns_of(call, arrays, hop)}
        if n + 1 < len(plan):
            travelling = sent(call, travelling, plan[n + 1][0] - hop)
        merges_once = not any(_overlaps(parts, m) for parts in of_devices for m in range(len(parts)))
        is_last = n + 1 == len(plan) and "sinks" not in arrays
        dtype = q.dtype if merges_once and (n == 0 or is_last) else wide
        splits = with_remainder and n > 0 and is_last and dtype != wide
        begins = q_begins(call, of_devices)
        operands = here, dropouts(call, arrays, plan[n]), begins, rows
        rows = on_device(call, of_devices, partial(_merged, call, n == 0, dtype, splits), *operands)
        # Keys are sent on only after this hop is computed, so that a device holds the keys of at most two hops.
        travelling, rows = lax.optimization_barrier((travelling, rows))
    o, lse, *remainder = rows
    if "sinks" in arrays:
        no_keys = map(jnp.zeros_like, remainder)
        of_sinks = jnp.zeros_like(o, wide), jnp.broadcast_to(sinks_lse(arrays), lse.shape), *no_keys
        o, lse, *remainder = _merge((o.astype(wide), lse, *remainder), of_sinks)
    rounded, of_o = _split(o, q.dtype)
    return rounded, lse, *(remainder or [of_o] * with_remainder)


def _merged(
    call: Ring,
    is_first: bool,
    dtype: Any,
    splits: bool,
    parts: tuple[Part, ...],
    here: Arrays,
    dropouts: list[Array | None],
    begins: list[Array],
    rows: Rows,
) -> Rows:
    """The rows of the previous hops merged with those of the parts of this hop; nothing precedes the first hop.

    Merged in the dtype of lse; o is returned in `dtype`, and if it `splits`, with the remainder of that.
    """
    in_dtype = lambda o, *others: (o.astype(dtype), *others, *([_split(o, dtype)[1]] if splits else []))
    before, wide = rows[0], rows[1].dtype
    rows = in_dtype(*rows)
    for n, (part, dropout, begin) in enumerate(zip(parts, dropouts, begins, strict=False)):
        found = _attend(call, part, of_part(part, here, dropout))
        if not is_first or _overlaps(parts, n):
            o, *others = rows if _overlaps(parts, n) else (before, *rows[1 : len(found)])
            o, *others = (rows_from(x, begin, part, _axis(x)) for x in (o, *others))
            found = _merge((o.astype(wide), *others), (found[0].astype(wide), *found[1:]))
        rows = tuple(with_rows_from(x, y, begin, _axis(x)) for x, y in zip(rows, in_dtype(*found), strict=True))
    return rows


def _split(o: Array, dtype: Any) -> tuple[Array, Array]:
    """o rounded to a dtype, and what rounding has left of it."""
    rounded = o.astype(dtype)
    return rounded, (o - rounded.astype(o.dtype)).astype(dtype)


def _axis(x: Array) -> int:
    """The axis of queries of o, of lse or of a remainder."""
    return 1 if x.ndim == 4 else 2


def _merge(a: Rows, b: Rows) -> Rows:
    """The rows of the union of two disjoint sets of keys, as `merge_attention`; an lse in two numbers is merged so."""
    if len(a) == 2:
        return merge_attention(*a, *b)
    (o_a, lse_a, remainder_a), (o_b, lse_b, remainder_b) = a, b
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(top == -jnp.inf, 0, top)
    of_a, of_b = jnp.exp(lse_a - top + remainder_a), jnp.exp(lse_b - top + remainder_b)
    empty = of_a + of_b == 0
    total = jnp.where(empty, 1, of_a + of_b)

    def part(weight: Array, o: Array) -> Array:
        weight = (weight / total).swapaxes(1, 2)[..., None]
        return weight * jnp.where(weight == 0, 0, o)  # o may be NaN for rows that see no key of the set

    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return part(of_a, o_a) + part(of_b, o_b), lse, jnp.where(empty, 0, top - lse + jnp.log(total))


def _overlaps(parts: tuple[Part, ...], n: int) -> bool:
    """Whether a part has queries of one before it."""
    return any(a.q_begin < parts[n].q_end and parts[n].q_begin < a.q_end for a in parts[:n])


def _attend(call: Ring, part: Part, given: Arrays) -> Rows:
    """The rows of a part: of its queries over its keys alone."""
    band = part.left, part.right
    o, lse = flash(call, given, band)
    if not _is_wide(o):
        return o, lse
    ones = jnp.ones_like(given["v"][..., :ONES])
    # Not what XLA could simplify with the forward: log Σ_j exp(s_j − lse) is 0 but for rounding.
    outputs = lax.optimization_barrier((jnp.zeros_like(o[..., : ones.shape[3]]), lse))
    summed = {name: x for name, x in given.items() if name != "dropout_key"} | {"v": ones}
    weights, _ = flash_tangent(without_dropout(call), summed, band, outputs, {"v": ones})
    total = weights[..., 0].swapaxes(1, 2).astype(lse.dtype)
    return o, lse, jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), 0)


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _statistics_dtype(q: Array) -> Any:
    return np.promote_types(q.dtype, np.float32)


def _is_wide(x: Array) -> bool:
    return x.dtype.itemsize > 2


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
