"""The derivative of ring attention, from o and lse of all keys.

With p = exp(s − lse), which are then the weights of the whole row,

    dlse = Σ_j p ds,   do = Σ_j p (ds v + dv) − o dlse,   and transposed   ds = p (do·v − δ),   δ = do·o − dlse

are sums over keys, and so over hops. The tangent and the backward of flash_attention compute the terms of a hop, and no
forward runs again. They are differentiable in o and lse too, so o and lse have derivatives of every order.

In 16 bits the rounding of lse is negligible in p, and that of o is as in any backward that is given o. In wider dtypes
neither is: an lse of 40 in float32 is rounded by 2e-6, and so are p and, as each hop's lse was rounded too, o. There
the hops first sum, with this lse,

    t = Σ_j p,   n = Σ_j p v

so that the weights are p/t and o is n/t. These are the terms of do above with dv = 1 and dv = v.

In a derivative each hop fetches its keys and values from the device that owns them and, transposed, sends their
gradients to that device directly, while the next hop is computed, or dq is added after the last.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._ring_hop import (
    Arrays,
    Hop,
    Ring,
    alike,
    columns_of,
    flash_tangent,
    keys_of,
    of_part,
    on_device,
    plan_of,
    rows_of,
    sent,
    sinks_lse,
    with_rows,
)
from ._ring_layout import Part


def tangent(call: Ring, arrays: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The tangents of o and lse, linear in the tangents `moving`."""
    if o.dtype.itemsize == 2:
        do, dlse = _terms(call, arrays, moving, o, lse)
        return do.astype(o.dtype), dlse
    total, exact = lax.stop_gradient(_total_and_o(call, *lax.stop_gradient((arrays, o, lse))))
    do, dlse = _terms(call, arrays, moving, o + (exact - lax.stop_gradient(o)), lse)
    return _over(do, total).astype(o.dtype), dlse / total


def _total_and_o(call: Ring, arrays: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """t and n/t; 1 and 0 for rows that see nothing. Each hop waits for the hop two before it, as in `_terms`."""
    sums, total = jnp.zeros_like(o), jnp.zeros_like(lse)
    chains = [arrays, arrays]
    for n, hop in enumerate(plan_of(call, arrays)):
        (added,) = _of_hops(_sums_of_part, call, [hop], chains[n % 2], {}, o, lse)
        chains[n % 2], added = lax.optimization_barrier((chains[n % 2], added))
        sums, total = sums + added[0], total + added[1]
    if "sinks" in arrays:
        total += _tangent_of_sinks(arrays, jnp.ones_like(arrays["sinks"]), o, lse)[1]
    total = jnp.where(total > 0, total, 1)
    return total, _over(sums, total)


def _over(x: Array, total: Array) -> Array:
    """x [b, s, h, e] over the sums of rows [b, h, s]."""
    return x / total.swapaxes(1, 2)[..., None]


def _terms(call: Ring, arrays: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The tangents of o and lse with the weights exp(s − lse), in the dtype of lse.

    Hops of even and of odd number form two chains: each hop waits for the hop two before it, and in the transpose, the
    backward, for the hop two after it. So a device holds the keys of the hop that it computes and of one that it
    receives, and no more. What passes from hop to hop has the dtypes of o and lse; only sums over hops are wider.
    Two hops are one step of a chain, and the backward fetches the keys of the second while it computes the first.
    """
    of_hops = {name: x for name, x in moving.items() if name != "sinks"}
    do, dlse = jnp.zeros_like(o, lse.dtype), jnp.zeros_like(lse)
    plan, chains = plan_of(call, arrays) if of_hops else [], [of_hops, of_hops]
    for n, hops in enumerate([plan] if len(plan) == 2 else [[hop] for hop in plan]):
        of_each = _of_hops(_tangent_of_part, call, hops, arrays, chains[n % 2], o, lse)
        chains[n % 2], of_each = lax.optimization_barrier((chains[n % 2], of_each))
        for added in of_each:
            do, dlse = do + added[0].astype(do.dtype), dlse + added[1]
    if "sinks" in moving:
        of_o, of_lse = _tangent_of_sinks(arrays, moving["sinks"], o, lse)
        do, dlse = do + of_o, dlse + of_lse
    return do, dlse


def _of_hops(
    terms: Callable, call: Ring, hops: list[Hop], arrays: Arrays, moving: Arrays, o: Array, lse: Array
) -> list[tuple[Array, Array]]:
    """The terms of the keys of each hop, in the shapes of o and lse. A backward fetches the keys again, all at once.

    A hop waits for the one after it. In the transpose it waits for the dk and dv of the one before it; dq, which is
    rounded only where hops are added, is not waited for.
    """

    @jax.checkpoint
    def of_hops(arrays, moving, o, lse):
        found = []
        for n, (hop, of_devices) in reversed(list(enumerate(hops))):
            fetched = [{**x, **sent(call, keys_of(x), hop), **columns_of(call, x, hop)} for x in (arrays, moving)]
            added = on_device(call, of_devices, partial(_of_parts, terms, call), *fetched, o, lse)
            if n:
                waiting, added = lax.optimization_barrier((keys_of(moving) or moving, added))
                moving = {**moving, **waiting}
            found.append(added)
        return found

    return of_hops(arrays, moving, o, lse)


def _of_parts(
    terms: Callable, call: Ring, parts: tuple[Part, ...], here: Arrays, moving: Arrays, o: Array, lse: Array
) -> tuple[Array, Array]:
    sums = alike(here, jnp.zeros_like(o), jnp.zeros_like(lse))
    for part in parts:
        added = terms(call, part, here, of_part(part, moving), o, lse)
        sums = [
            with_rows(x, rows_of(x, part, axis) + y, part, axis) for x, y, axis in zip(sums, added, (1, 2), strict=True)
        ]
    return tuple(sums)


def _tangent_of_part(call: Ring, part: Part, here: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the keys of a part, of which o and lse of all keys are the residuals; moving are tangents of it."""
    outputs = rows_of(o, part, 1), rows_of(lse, part, 2)
    return flash_tangent(call, of_part(part, here), (part.left, part.right), outputs, moving)


def _sums_of_part(call: Ring, part: Part, here: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """Σ p v and Σ p over the keys of a part; nothing moves."""
    v = of_part(part, here)["v"]
    along = lambda dv: _tangent_of_part(call, part, here, {**moving, "v": dv}, o, lse)[0]
    return along(v), along(jnp.ones_like(v))[..., 0].swapaxes(1, 2)


def _tangent_of_sinks(arrays: Arrays, moving: Array, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the sinks, keys without values: dlse = Σ_n exp(sink_n − lse) dsink_n, do = −o dlse."""
    weights = jnp.exp(arrays["sinks"][:, :, None] - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    dlse = (weights * moving[:, :, None]).sum(-1)
    of_rows = lambda x: x.swapaxes(1, 2)[..., None]
    # A row that sees sinks alone has o = 0, and the transpose has to give 0 there even for a cotangent that is NaN.
    sees_keys = of_rows(lse != sinks_lse(arrays)) | (o != 0).any(-1, keepdims=True)
    return jnp.where(sees_keys, -o.astype(lse.dtype) * of_rows(dlse), 0), dlse
