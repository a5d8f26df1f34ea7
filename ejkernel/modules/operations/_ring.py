"""Ring attention: keys and values are passed around the devices, and each hop is a call of flash_attention.

The hops are unrolled: in a loop XLA sends once more than needed and overlaps less, and the parts differ between hops.

The forward merges the hops and holds only o and lse of the keys so far. It saves q, k, v, o and lse alone, of which
`_ring_tangent.py` makes the derivatives of every order.

Hops are merged by weights exp(lse), and an lse of 200 in float32 is rounded by 8e-6, and the weights with it. In 16
bits that is negligible. In wider dtypes each call has a second one, a tangent along v = 1, which sums the weights of
its keys by the rounded lse: t = Σ_j exp(s_j − lse). So the exact lse is lse + log t, two numbers that are merged as
such.
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
)
from ._ring_layout import Part
from ._ring_tangent import tangent
from .merge_attention import merge_attention

RESULTS = ("o", "lse", "lse")
# Features of the v of ones by which weights are summed, which every implementation takes.
ONES = 8

Rows = tuple[Array, ...]
"""o and lse; and in float32 and wider, what rounding has left of lse."""
AXES = (1, 2, 2)
"""The axis of queries of each."""


def ring(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o in q's dtype, and lse, from arrays that all vary over the same manual axes. Differentiable to any order.

    sinks are [1, heads, n], softmax_scale is a traced scalar; bias and mask have four axes.
    """
    arrays = _of_each_element(arrays)

    @jax.custom_jvp
    def attention(arrays):
        return _forward(call, arrays)

    def derivative(primals, tangents):
        (arrays,), (tangents,) = primals, tangents
        rows = zip(RESULTS, attention(arrays), strict=False)
        o, lse, *left = rows = tuple(checkpoint_name(x, f"ring_attention_{name}") for name, x in rows)
        moving = {name: x for name, x in tangents.items() if not _is_zero(x)}
        of_results = tangent(call, arrays, moving, o, lse, *left)
        return rows, (*of_results, *map(jnp.zeros_like, left))

    attention.defjvp(derivative, symbolic_zeros=True)
    return attention(arrays)[:2]


def _of_each_element(arrays: Arrays) -> Arrays:
    """Sinks [b, heads, n] and a scale [b, 1]: the whole ring, not each hop, sums their cotangents over the batch."""
    of_batch = jnp.zeros_like(arrays["q"][:, 0, 0, 0])  # which Explicit axes may split
    one_each = {"sinks": of_batch[:, None, None], "softmax_scale": of_batch[:, None]}
    return arrays | {n: arrays[n] + like.astype(arrays[n].dtype) for n, like in one_each.items() if n in arrays}


# --- Forward ---------------------------------------------------------------------------------------------------------


def _forward(call: Ring, arrays: Arrays) -> Rows:
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
        begins = q_begins(call, of_devices)
        rows = on_device(call, of_devices, partial(_merged, call, n == 0, dtype), here, begins, rows)
        # Keys are sent on only after this hop is computed, so that a device holds the keys of at most two hops.
        travelling, rows = lax.optimization_barrier((travelling, rows))
    o, lse, *left = rows
    if "sinks" in arrays:
        of_sinks = jnp.zeros_like(o, wide), jnp.broadcast_to(sinks_lse(arrays), lse.shape), *map(jnp.zeros_like, left)
        o, lse, *left = _merge((o.astype(wide), lse, *left), of_sinks)
    return o.astype(q.dtype), lse, *left


def _merged(
    call: Ring,
    is_first: bool,
    dtype: Any,
    parts: tuple[Part, ...],
    here: Arrays,
    begins: list[Array],
    rows: Rows,
) -> Rows:
    """The rows of the previous hops merged with those of the parts of this hop; nothing precedes the first hop.

    Merged in the dtype of lse; o is returned in `dtype`.
    """
    before, wide = rows[0], rows[1].dtype
    rows = rows[0].astype(dtype), *rows[1:]
    for n, (part, begin) in enumerate(zip(parts, begins, strict=False)):
        found = _attend(call, part, here)
        if not is_first or _overlaps(parts, n):
            o, *others = rows if _overlaps(parts, n) else (before, *rows[1:])
            o = rows_from(o, begin, part, 1).astype(wide)
            found = _merge((o, *(rows_from(x, begin, part, 2) for x in others)), (found[0].astype(wide), *found[1:]))
        found = found[0].astype(dtype), *found[1:]
        rows = tuple(with_rows_from(x, y, begin, axis) for x, y, axis in zip(rows, found, AXES, strict=False))
    return rows


def _merge(a: Rows, b: Rows) -> Rows:
    """The rows of the union of two disjoint sets of keys, as `merge_attention`; an lse in two numbers is merged so."""
    if len(a) == 2:
        return merge_attention(*a, *b)
    (o_a, lse_a, left_a), (o_b, lse_b, left_b) = a, b
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(top == -jnp.inf, 0, top)
    of_a, of_b = jnp.exp(lse_a - top + left_a), jnp.exp(lse_b - top + left_b)
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


def _attend(call: Ring, part: Part, here: Arrays) -> Rows:
    """The rows of a part: of its queries over its keys alone."""
    given, band = of_part(part, here), (part.left, part.right)
    o, lse = flash(call, given, band)
    if not _is_wide(o):
        return o, lse
    ones = jnp.ones_like(given["v"][..., :ONES])
    # Not what XLA could simplify with the forward: log Σ_j exp(s_j − lse) is 0 but for rounding.
    outputs = lax.optimization_barrier((jnp.zeros_like(o[..., : ones.shape[3]]), lse))
    weights, _ = flash_tangent(call, {**given, "v": ones}, band, outputs, {"v": ones})
    total = weights[..., 0].swapaxes(1, 2).astype(lse.dtype)
    return o, lse, jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), 0)


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _statistics_dtype(q: Array) -> Any:
    return np.promote_types(q.dtype, np.float32)


def _is_wide(x: Array) -> bool:
    return x.dtype.itemsize > 2


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
