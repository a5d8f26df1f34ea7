"""The derivative of ring attention, from o and lse of all keys.

With p = exp(s − lse), which are then the weights of the whole row,

    dlse = Σ_j p ds,   do = Σ_j p (ds v + dv) − o dlse,   and transposed   ds = p (do·v − δ),   δ = do·o − dlse

are sums over keys, and so over hops. The tangent and the backward of flash_attention compute the terms of a hop, and no
forward runs again. They are differentiable in o and lse too, so o and lse have derivatives of every order.

In 16 bits the rounding of lse is negligible in p. In wider dtypes it is not: an lse of 40 in float32 is rounded by
2e-6, and so is p. There the forward gives what is left of lse, log Σ_j p, and p/Σ_j p are the weights. That of o is as
in any backward which is given o, but in 16 bits it would follow the rounding of each hop's o; so the forward gives what
is left of o, r, and do has another term, −r dlse.

In a derivative each hop fetches its keys and values from the device that owns them and, transposed, sends their
gradients to that device directly, while the next hop is computed, or dq is added after the last.
"""

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
    dropouts,
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


def tangent(call: Ring, arrays: Arrays, moving: Arrays, o: Array, lse: Array, remainder: Array) -> tuple[Array, Array]:
    """The tangents of o and lse, linear in the tangents `moving`; the remainder is of o in 16 bits, else of lse."""
    do, dlse = _terms(call, arrays, moving, o, lse)
    remainder = lax.stop_gradient(remainder)
    if o.dtype.itemsize == 2:
        # Rows that see nothing have no remainder, and the transpose has to give 0 there even for a cotangent of NaN.
        of_remainder = jnp.where(remainder != 0, remainder.astype(do.dtype) * dlse.swapaxes(1, 2)[..., None], 0)
        return (do - of_remainder).astype(o.dtype), dlse
    total = jnp.exp(remainder)
    return _over(do, total).astype(o.dtype), dlse / total


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
        of_each = _of_hops(call, hops, arrays, chains[n % 2], o, lse)
        chains[n % 2], of_each = lax.optimization_barrier((chains[n % 2], of_each))
        for added in of_each:
            do, dlse = do + added[0].astype(do.dtype), dlse + added[1]
    if "sinks" in moving:
        of_o, of_lse = _tangent_of_sinks(arrays, moving["sinks"], o, lse)
        do, dlse = do + of_o, dlse + of_lse
    return do, dlse


def _of_hops(
    call: Ring, hops: list[Hop], arrays: Arrays, moving: Arrays, o: Array, lse: Array
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
            dropout = dropouts(call, arrays, (hop, of_devices))
            added = on_device(call, of_devices, partial(_of_parts, call), *fetched, dropout, o, lse)
            if n:
                waiting, added = lax.optimization_barrier((keys_of(moving) or moving, added))
                moving = {**moving, **waiting}
            found.append(added)
        return found

    return of_hops(arrays, moving, o, lse)


def _of_parts(
    call: Ring,
    parts: tuple[Part, ...],
    here: Arrays,
    moving: Arrays,
    dropouts: list[Array | None],
    o: Array,
    lse: Array,
) -> tuple[Array, Array]:
    sums = alike(here, jnp.zeros_like(o), jnp.zeros_like(lse))
    for part, dropout in zip(parts, dropouts, strict=False):
        outputs, given = (rows_of(o, part, 1), rows_of(lse, part, 2)), of_part(part, here, dropout)
        added = flash_tangent(call, given, (part.left, part.right), outputs, of_part(part, moving))
        sums = [
            with_rows(x, rows_of(x, part, axis) + y, part, axis) for x, y, axis in zip(sums, added, (1, 2), strict=True)
        ]
    return tuple(sums)


def _tangent_of_sinks(arrays: Arrays, moving: Array, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the sinks, keys without values: dlse = Σ_n exp(sink_n − lse) dsink_n, do = −o dlse."""
    weights = jnp.exp(arrays["sinks"][:, :, None] - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    dlse = (weights * moving[:, :, None]).sum(-1)
    of_rows = lambda x: x.swapaxes(1, 2)[..., None]
    # A row that sees sinks alone has o = 0, and the transpose has to give 0 there even for a cotangent that is NaN.
    sees_keys = of_rows(lse != sinks_lse(arrays)) | (o != 0).any(-1, keepdims=True)
    return jnp.where(sees_keys, -o.astype(lse.dtype) * of_rows(dlse), 0), dlse
