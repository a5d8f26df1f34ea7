"""Ring attention: keys and values are passed around the devices, and each hop is a call of flash_attention.

The hops are unrolled: in a loop XLA sends once more than needed and overlaps less, and the parts differ between hops.

The forward merges the hops and holds only o and lse of the keys so far. With L the lse of all keys and O their output,
and o_t and lse_t the results of hop t alone, the tangents of both are

    dlse = Σ_t w_t·dlse_t,   do = Σ_t w_t·(do_t + (o_t − O)·dlse_t),   w_t = exp(lse_t − L)

sums over hops, in which no hop needs results of another. They are the derivative of

    Σ_t w_t,   Σ_t w_t·(o_t − O)   with L and O held constant

for any values of q, k and v, so it is differentiable itself, and o and lse have derivatives of every order. The forward
saves only q, k, v, o and lse. In a derivative each hop fetches its keys and values from the device that owns them and,
transposed, sends their gradients to that device directly, while the next hop is computed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ...xla_utils.device_switch import device_switch
from ._ring_layout import Band, Part, hops
from .flash_attention import FlashAttention
from .merge_attention import merge_attention

TRAVELLING = ("k", "v", "kv_segment_ids")
RESULTS = ("o", "lse")
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Ring:
    """A call of ring attention without its arrays.

    Attributes:
        axis_name: the mesh axis over which the sequence is sharded.
        size: its number of devices.
        layout: which tokens each device has.
        band: the band of the whole sequence, i' − left ≤ j ≤ i' + right, where query i is aligned with key i'.
        options: the options of each call of flash_attention.
    """

    axis_name: Any
    size: int
    layout: str
    band: Band
    options: Mapping[str, Any]


def ring(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o in q's dtype, and lse, from arrays that all vary over the same manual axes. Differentiable to any order.

    sinks are [1, heads, n], softmax_scale is a traced scalar; bias and mask have four axes.
    """

    @jax.custom_jvp
    def attention(arrays):
        return _forward(call, arrays)

    def derivative(primals, tangents):
        (arrays,), (tangents,) = primals, tangents
        o, lse = (checkpoint_name(x, f"ring_attention_{n}") for n, x in zip(RESULTS, attention(arrays), strict=True))
        moving = {name: x for name, x in tangents.items() if not _is_zero(x)}
        return (o, lse), _tangent(call, arrays, moving, o, lse)

    attention.defjvp(derivative, symbolic_zeros=True)
    return attention(arrays)


# --- Forward ---------------------------------------------------------------------------------------------------------


def _forward(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse merged over the hops; the keys of the next hop are sent before this one is computed.

    The first o stays in its own dtype, in which its hop rounds it anyway, and the last is rounded where it is merged:
    only between hops is o in the dtype of statistics, which doubles what it takes to read and write.
    """
    q, v = arrays["q"], arrays["v"]
    wide = _statistics_dtype(q)
    o, lse = _alike(arrays, jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), jnp.full(_lse_shape(q), -jnp.inf, wide))
    travelling = _travelling(arrays)
    plan = list(_plan(call, arrays))
    for n, (hop, of_devices) in enumerate(plan):
        here = {**arrays, **travelling, **_columns(call, arrays, hop)}
        if n + 1 < len(plan):
            travelling = _sent(call, travelling, plan[n + 1][0] - hop)
        merges_once = not any(_overlaps(parts, m) for parts in of_devices for m in range(len(parts)))
        is_last = n + 1 == len(plan) and "sinks" not in arrays
        dtype = q.dtype if merges_once and (n == 0 or is_last) else wide
        o, lse = _on_device(call, of_devices, partial(_merged, call, n == 0, dtype), here, o, lse)
        # Keys are sent on only after this hop is computed, so that a device holds the keys of at most two hops.
        travelling, o, lse = lax.optimization_barrier((travelling, o, lse))
    if "sinks" in arrays:
        o, lse = merge_attention(
            o.astype(wide), lse, jnp.zeros_like(o, wide), jnp.broadcast_to(_sinks_lse(arrays), lse.shape)
        )
    return o.astype(q.dtype), lse


def _merged(
    call: Ring, is_first: bool, dtype: Any, parts: tuple[Part, ...], here: Arrays, o: Array, lse: Array
) -> tuple[Array, Array]:
    """o and lse of the previous hops merged with those of the parts of this hop; nothing precedes the first hop.

    Merged in the dtype of lse; o is returned in `dtype`.
    """
    before, o, wide = o, o.astype(dtype), lse.dtype
    for n, part in enumerate(parts):
        rows = slice(part.q_begin, part.q_end)
        found = _attend(call, part, here)
        if not is_first or _overlaps(parts, n):
            of_rows = (o if _overlaps(parts, n) else before)[:, rows].astype(wide)
            found = merge_attention(of_rows, lse[:, :, rows], found[0].astype(wide), found[1])
        o, lse = _with_rows(o, found[0].astype(dtype), part, 1), _with_rows(lse, found[1], part, 2)
    return o, lse


def _overlaps(parts: tuple[Part, ...], n: int) -> bool:
    """Whether a part has queries of one before it."""
    return any(a.q_begin < parts[n].q_end and parts[n].q_begin < a.q_end for a in parts[:n])


def _attend(call: Ring, part: Part, here: Arrays) -> tuple[Array, Array]:
    """o and lse of a part: of its queries over its keys alone."""
    rows, columns = slice(part.q_begin, part.q_end), slice(part.k_begin, part.k_end)
    of_rows, of_columns = ("q", "q_segment_ids"), TRAVELLING
    given = {name: here[name][:, rows] for name in of_rows if name in here}
    given |= {name: here[name][:, columns] for name in of_columns if name in here}
    for name in ("bias", "mask"):
        if name in here:
            x = here[name]
            x = x if x.shape[2] == 1 else x[:, :, rows]
            given[name] = x if x.shape[3] == 1 else x[:, :, :, columns]
    return flash(call, given | {n: here[n] for n in ("softmax_scale",) if n in here}, (part.left, part.right))


def flash(call: Ring, given: Arrays, band: Band) -> tuple[Array, Array]:
    """o and lse of one call of flash_attention with the ring's options."""
    left, right = band
    causal = right == 0
    window = None if left is None and (causal or right is None) else (left, None if causal else right)
    return FlashAttention.call(**{**call.options, **given}, causal=causal, window=window, return_lse=True)


# --- Derivative ------------------------------------------------------------------------------------------------------


def _tangent(call: Ring, arrays: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The tangents of o and lse, linear in the tangents `moving`.

    Hops of even and of odd number form two chains: each hop waits for the hop two before it, and in the transpose, the
    backward, for the hop two after it. So a device holds the keys of the hop that it computes and of one that it
    receives, and no more.
    """
    still = o.astype(lse.dtype), jnp.where(jnp.isfinite(lse), lse, 0)
    of_hops = {name: x for name, x in moving.items() if name != "sinks"}
    total = tuple(jnp.zeros_like(x) for x in still)
    chains = [(of_hops, total), (of_hops, total)]
    for n, (hop, of_devices) in enumerate(_plan(call, arrays) if of_hops else ()):
        along, done = chains[n % 2]
        added = _jvp(partial(_weighted, call, hop, of_devices), arrays, along, *still)
        chains[n % 2] = lax.optimization_barrier((along, _sum(done, added)))
    do, dlse = _sum(chains[0][1], chains[1][1])
    if "sinks" in moving:
        do, dlse = _sum((do, dlse), _jvp(_weighted_sinks, arrays, {"sinks": moving["sinks"]}, *still))
    return do.astype(o.dtype), dlse


def _jvp(f: Callable, arrays: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The tangents of f(arrays, o, lse) for the tangents `moving` of arrays; o and lse are constant."""
    function = lambda x: f({**arrays, **x}, o, lse)
    return jax.jvp(function, ({name: arrays[name] for name in moving},), (moving,))[1]


def _weighted(call: Ring, hop: int, of_devices: list[tuple[Part, ...]], arrays: Arrays, o: Array, lse: Array) -> Any:
    """Σ w·(o_t − O) and Σ w over the parts of a hop, w = exp(lse_t − L). A backward recomputes all of it."""

    @jax.checkpoint
    def of_hop(arrays, o, lse):
        here = {**arrays, **_sent(call, _travelling(arrays), hop), **_columns(call, arrays, hop)}
        return _on_device(call, of_devices, partial(_sums_of_parts, call), here, o, lse)

    return of_hop(arrays, o, lse)


def _sums_of_parts(call: Ring, parts: tuple[Part, ...], here: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    sums = _alike(here, jnp.zeros_like(o), jnp.zeros_like(lse))
    for part in parts:
        rows = slice(part.q_begin, part.q_end)
        of_part, lse_of_part = _attend(call, part, here)
        added = _weighted_difference(of_part.astype(o.dtype), lse_of_part, o[:, rows], lse[:, :, rows])
        sums = [
            _with_rows(x, lax.slice_in_dim(x, *rows.indices(x.shape[axis])[:2], axis=axis) + y, part, axis)
            for x, y, axis in zip(sums, added, (1, 2), strict=True)
        ]
    return tuple(sums)


def _weighted_sinks(arrays: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the sinks, which have no values, in the sums of `_weighted`."""
    return _weighted_difference(jnp.zeros_like(o), jnp.broadcast_to(_sinks_lse(arrays), lse.shape), o, lse)


def _weighted_difference(o_t: Array, lse_t: Array, o: Array, lse: Array) -> tuple[Array, Array]:
    w = jnp.exp(lse_t - lse)
    return w.swapaxes(1, 2)[..., None] * (o_t - o), w


# --- What travels ----------------------------------------------------------------------------------------------------


def _travelling(arrays: Arrays) -> Arrays:
    return {name: arrays[name] for name in TRAVELLING if name in arrays}


def _sent(call: Ring, arrays: Arrays, distance: int) -> Arrays:
    """The arrays of the device that is `distance` places before this one in the ring."""
    if distance == 0:
        return arrays
    pairs = [(d, (d + distance) % call.size) for d in range(call.size)]
    return {name: lax.ppermute(x, call.axis_name, pairs) for name, x in arrays.items()}


def _columns(call: Ring, arrays: Arrays, hop: int) -> Arrays:
    """The columns of bias and mask for the keys of a hop, out of the columns of all devices."""
    source = (lax.axis_index(call.axis_name) - hop) % call.size
    found = {}
    for name in ("bias", "mask"):
        if name in arrays:
            x = arrays[name]
            count = x.shape[3] // call.size
            found[name] = x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, source * count, count, 3)
    return found


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _plan(call: Ring, arrays: Arrays):
    return hops(arrays["q"].shape[1], arrays["k"].shape[1], call.size, call.layout, call.band)


def _on_device(call: Ring, of_devices: list[tuple[Part, ...]], body: Callable, *operands: Any) -> Any:
    """body(parts, *operands) with the parts of this device; each distinct list of parts is traced once, in a switch."""
    distinct = list(dict.fromkeys(of_devices))
    branches = [partial(body, parts) for parts in distinct]
    if len(branches) == 1:
        return branches[0](*operands)
    which = jnp.asarray(np.array([distinct.index(parts) for parts in of_devices], np.int32))
    return device_switch("ring_attention", which[lax.axis_index(call.axis_name)], branches, *operands)


def _with_rows(x: Array, rows: Array, part: Part, axis: int) -> Array:
    """x with the rows of a part written to their place."""
    if rows.shape == x.shape:
        return rows
    return lax.dynamic_update_slice_in_dim(x, rows, part.q_begin, axis)


def _sum(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return a[0] + b[0], a[1] + b[1]


def _sinks_lse(arrays: Arrays) -> Array:
    """The logsumexp of the sinks of each head, [1, heads, 1]."""
    return jax.nn.logsumexp(arrays["sinks"], axis=-1)[:, :, None]


def _alike(arrays: Arrays, *made: Array) -> list[Array]:
    """New arrays, cast to vary over the manual axes over which q varies."""
    axes = jax.typeof(arrays["q"]).manual_axis_type.varying
    missing = [axes - jax.typeof(x).manual_axis_type.varying for x in made]
    return [lax.pcast(x, tuple(sorted(m)), to="varying") if m else x for x, m in zip(made, missing, strict=True)]


def _lse_shape(q: Array) -> tuple[int, int, int]:
    return q.shape[0], q.shape[2], q.shape[1]


def _statistics_dtype(q: Array) -> Any:
    return np.promote_types(q.dtype, np.float32)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)
