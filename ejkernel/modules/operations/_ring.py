"""Ring attention: keys and values are passed around the devices, and each hop is a call of flash_attention.

The hops are unrolled: in a loop XLA sends once more than needed and overlaps less, and the parts differ between hops.

The forward merges the hops and holds only o and lse of the keys so far. It saves q, k, v, o and lse alone, of which
`_ring_tangent.py` makes the derivatives of every order.
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

RESULTS = ("o", "lse")


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
        o, lse = (checkpoint_name(x, f"ring_attention_{n}") for n, x in zip(RESULTS, attention(arrays), strict=True))
        moving = {name: x for name, x in tangents.items() if not _is_zero(x)}
        return (o, lse), tangent(call, arrays, moving, o, lse)

    attention.defjvp(derivative, symbolic_zeros=True)
    return attention(arrays)


def _of_each_element(arrays: Arrays) -> Arrays:
    """Sinks [b, heads, n] and a scale [b, heads], whose cotangents the whole ring sums over the batch, not each hop."""
    of_heads = jnp.zeros_like(arrays["q"][:, 0, :, 0])  # whose batch and heads Explicit axes may split
    each = {"sinks": of_heads[..., None], "softmax_scale": of_heads}
    return arrays | {name: arrays[name] + x.astype(arrays[name].dtype) for name, x in each.items() if name in arrays}


# --- Forward ---------------------------------------------------------------------------------------------------------


def _forward(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse merged over the hops; the keys of the next hop are sent before this one is computed.

    The first o stays in its own dtype, in which its hop rounds it anyway, and the last is rounded where it is merged:
    only between hops is o in the dtype of statistics, which doubles what it takes to read and write.
    """
    q, v = arrays["q"], arrays["v"]
    wide = _statistics_dtype(q)
    # Made from q, whose batch and heads Explicit axes may split.
    o = jnp.broadcast_to(jnp.zeros_like(q[..., :1]), (*q.shape[:3], v.shape[3]))
    o, lse = alike(arrays, o, jnp.full_like(q[..., 0], -jnp.inf, wide).swapaxes(1, 2))
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
        o, lse = on_device(call, of_devices, partial(_merged, call, n == 0, dtype), here, begins, o, lse)
        # Keys are sent on only after this hop is computed, so that a device holds the keys of at most two hops.
        travelling, o, lse = lax.optimization_barrier((travelling, o, lse))
    if "sinks" in arrays:
        o, lse = merge_attention(
            o.astype(wide), lse, jnp.zeros_like(o, wide), jnp.broadcast_to(sinks_lse(arrays), lse.shape)
        )
    return o.astype(q.dtype), lse


def _merged(
    call: Ring,
    is_first: bool,
    dtype: Any,
    parts: tuple[Part, ...],
    here: Arrays,
    begins: list[Array],
    o: Array,
    lse: Array,
) -> tuple[Array, Array]:
    """o and lse of the previous hops merged with those of the parts of this hop; nothing precedes the first hop.

    Merged in the dtype of lse; o is returned in `dtype`.
    """
    before, o, wide = o, o.astype(dtype), lse.dtype
    for n, (part, begin) in enumerate(zip(parts, begins, strict=False)):
        found = _attend(call, part, here)
        if not is_first or _overlaps(parts, n):
            of_rows = rows_from(o if _overlaps(parts, n) else before, begin, part, 1).astype(wide)
            found = merge_attention(of_rows, rows_from(lse, begin, part, 2), found[0].astype(wide), found[1])
        o = with_rows_from(o, found[0].astype(dtype), begin, 1)
        lse = with_rows_from(lse, found[1], begin, 2)
    return o, lse


def _overlaps(parts: tuple[Part, ...], n: int) -> bool:
    """Whether a part has queries of one before it."""
    return any(a.q_begin < parts[n].q_end and parts[n].q_begin < a.q_end for a in parts[:n])


def _attend(call: Ring, part: Part, here: Arrays) -> tuple[Array, Array]:
    """o and lse of a part: of its queries over its keys alone."""
    return flash(call, of_part(part, here), (part.left, part.right))


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _statistics_dtype(q: Array) -> Any:
    return np.promote_types(q.dtype, np.float32)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
