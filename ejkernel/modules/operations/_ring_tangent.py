"""The derivative of ring attention, from o and lse of all keys.

With p = exp(s − lse), which are then the weights of the whole row,

    dlse = Σ_j p ds,   do = Σ_j p (ds v + dv) − o dlse,   and transposed   ds = p (do·v − δ),   δ = do·o − dlse

are sums over keys, and so over hops. The tangent and the backward of flash_attention compute the terms of a hop, and no
forward runs again. They are differentiable in o and lse too, so o and lse have derivatives of every order.

In 16 bits the rounding of lse is negligible in p, and that of o is as in any backward that is given o. In float32
neither is: where one key has nearly all the weight of a row, gradients are small differences, which flash_attention
computes from sums over the keys of a call. There each hop runs again. With its own o_t and lse_t the sums are

    dlse = Σ_t dw_t,   do = Σ_t d(w_t (o_t − o)),   w_t = exp(lse_t − lse),   with o and lse held constant

In a derivative each hop fetches its keys and values from the device that owns them and, transposed, sends their
gradients to that device directly, while the next hop is computed.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

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
    rows_of,
    sent,
    sight,
    with_rows,
)
from ._ring_layout import Part
from .flash_attention import FlashAttention


def tangent(call: Ring, arrays: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The tangents of o and lse, linear in the tangents `moving`.

    Hops of even and of odd number form two chains: each hop waits for the hop two before it, and in the transpose, the
    backward, for the hop two after it. So a device holds the keys of the hop that it computes and of one that it
    receives, and no more. What passes from hop to hop has the dtypes of o and lse; only sums over hops are wider.
    """
    of_hops = {name: x for name, x in moving.items() if name != "sinks"}
    do, dlse = jnp.zeros_like(o, lse.dtype), jnp.zeros_like(lse)
    chains = [of_hops, of_hops]
    for n, (hop, of_devices) in enumerate(plan_of(call, arrays) if of_hops else ()):
        added = _tangent_of_hop(call, hop, of_devices, arrays, chains[n % 2], o, lse)
        chains[n % 2], added = lax.optimization_barrier((chains[n % 2], added))
        do, dlse = do + added[0].astype(do.dtype), dlse + added[1]
    if "sinks" in moving:
        of_o, of_lse = _tangent_of_sinks(arrays, moving["sinks"], o, lse)
        do, dlse = do + of_o, dlse + of_lse
    return do.astype(o.dtype), dlse


def _tangent_of_hop(
    call: Ring, hop: int, of_devices: list[tuple[Part, ...]], arrays: Arrays, moving: Arrays, o: Array, lse: Array
) -> tuple[Array, Array]:
    """The terms of a hop's keys in the tangents of o and lse. A backward fetches the keys again."""

    @jax.checkpoint
    def of_hop(arrays, moving, o, lse):
        fetched = [{**x, **sent(call, keys_of(x), hop), **columns_of(call, x, hop)} for x in (arrays, moving)]
        return on_device(call, of_devices, partial(_tangent_of_parts, call), *fetched, o, lse)

    return of_hop(arrays, moving, o, lse)


def _tangent_of_parts(
    call: Ring, parts: tuple[Part, ...], here: Arrays, moving: Arrays, o: Array, lse: Array
) -> tuple[Array, Array]:
    sums = alike(here, jnp.zeros_like(o), jnp.zeros_like(lse))
    terms = _tangent_of_part if jnp.finfo(o.dtype).bits == 16 else _tangent_of_part_again
    for part in parts:
        added = terms(call, part, here, moving, o, lse)
        sums = [
            with_rows(x, rows_of(x, part, axis) + y, part, axis) for x, y, axis in zip(sums, added, (1, 2), strict=True)
        ]
    return tuple(sums)


def _tangent_of_part(call: Ring, part: Part, here: Arrays, moving: Arrays, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the keys of a part, of which o and lse of all keys are the residuals."""
    options = {name: x for name, x in call.options.items() if name != "config"}
    given = options | of_part(part, here) | sight((part.left, part.right))
    prepared = FlashAttention.prepare_arguments(**given, return_lse=True)
    prepared = replace(prepared, spec=replace(prepared.spec, split=True))
    tangents = {name: x.reshape(prepared.named[name].shape) for name, x in of_part(part, moving).items()}
    outputs = dict(o=rows_of(o, part, 1), lse=rows_of(lse, part, 2))
    found = FlashAttention.tangent(prepared, outputs, tangents, call.options["config"])
    return found["o"], found["lse"]


def _tangent_of_part_again(
    call: Ring, part: Part, here: Arrays, moving: Arrays, o: Array, lse: Array
) -> tuple[Array, Array]:
    """The same terms by the derivative of w·(o_t − o) and w, which is 0 exactly where a part has all the weight."""
    given, along, o, lse = of_part(part, here), of_part(part, moving), rows_of(o, part, 1), rows_of(lse, part, 2)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)

    def weighted(moved):
        of_keys, lse_of_keys = flash(call, {**given, **moved}, (part.left, part.right))
        w = jnp.exp(lse_of_keys - lse)
        return w.swapaxes(1, 2)[..., None] * (of_keys - o), w

    return jax.jvp(weighted, ({name: given[name] for name in along},), (along,))[1]


def _tangent_of_sinks(arrays: Arrays, moving: Array, o: Array, lse: Array) -> tuple[Array, Array]:
    """The terms of the sinks, keys without values: dlse = Σ_n exp(sink_n − lse) dsink_n, do = −o dlse."""
    weights = jnp.exp(arrays["sinks"][:, :, None] - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    dlse = (weights * moving[:, :, None]).sum(-1)
    return -o.astype(lse.dtype) * dlse.swapaxes(1, 2)[..., None], dlse
