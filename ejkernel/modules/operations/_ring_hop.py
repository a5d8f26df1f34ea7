"""What a hop of a ring consists of: the keys that are sent, the part that a device computes, and the call for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...xla_utils.device_switch import device_switch
from .._operation import Prepared
from ._dropout import with_places
from ._ring_layout import Band, Part, hops, place
from .flash_attention import FlashAttention

TRAVELLING = ("k", "v", "kv_segment_ids")
Arrays = dict[str, Any]
Hop = tuple[int, list[tuple[Part, ...]]]
"""How far keys have travelled, and the parts of every device."""


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


def plan_of(call: Ring, arrays: Arrays) -> list[Hop]:
    """The hops that are computed. For dropout the tokens of a part are consecutive, or a step apart."""
    lengths, in_runs = (arrays["q"].shape[1], arrays["k"].shape[1]), "dropout_key" in arrays
    return list(hops(*lengths, call.size, call.layout, call.band, in_runs))


# --- What travels ----------------------------------------------------------------------------------------------------


def keys_of(arrays: Arrays) -> Arrays:
    return {name: arrays[name] for name in TRAVELLING if name in arrays}


def sent(call: Ring, arrays: Arrays, distance: int) -> Arrays:
    """The arrays of the device that is `distance` places before this one in the ring."""
    if distance == 0:
        return arrays
    pairs = [(d, (d + distance) % call.size) for d in range(call.size)]
    return {name: lax.ppermute(x, call.axis_name, pairs) for name, x in arrays.items()}


def columns_of(call: Ring, arrays: Arrays, hop: int) -> Arrays:
    """The columns of bias and mask for the keys of a hop, out of the columns of all devices."""
    source = (lax.axis_index(call.axis_name) - hop) % call.size
    found = {}
    for name in ("bias", "mask"):
        if name in arrays:
            x = arrays[name]
            count = x.shape[3] // call.size
            found[name] = x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, source * count, count, 3)
    return found


# --- What a device computes ------------------------------------------------------------------------------------------


def on_device(call: Ring, of_devices: list[tuple[Part, ...]], body: Callable, *operands: Any) -> Any:
    """body(parts, *operands) with the parts of this device; each distinct list of parts is traced once, in a switch."""
    distinct = list(dict.fromkeys(of_devices))
    branches = [partial(body, parts) for parts in distinct]
    if len(branches) == 1:
        return branches[0](*operands)
    which = jnp.asarray(np.array([distinct.index(parts) for parts in of_devices], np.int32))
    return device_switch("ring_attention", which[lax.axis_index(call.axis_name)], branches, *operands)


def of_part(part: Part, here: Arrays, dropout: Array | None = None) -> Arrays:
    """The rows and columns of a part, of arrays or of their tangents, and the words of its dropout."""
    rows, columns = slice(part.q_begin, part.q_end), slice(part.k_begin, part.k_end)
    given = {name: here[name][:, rows] for name in ("q", "q_segment_ids") if name in here}
    given |= {name: here[name][:, columns] for name in TRAVELLING if name in here}
    for name in ("bias", "mask"):
        if name in here:
            x = here[name]
            x = x if x.shape[2] == 1 else x[:, :, rows]
            given[name] = x if x.shape[3] == 1 else x[:, :, :, columns]
    given |= {name: here[name] for name in ("softmax_scale",) if name in here}
    return given if dropout is None else given | {"dropout_key": dropout}


def flash(call: Ring, given: Arrays, band: Band) -> tuple[Array, Array]:
    """o and lse of one call of flash_attention with the ring's options."""
    return FlashAttention.run_prepared(_prepared(call, given, band), call.options["config"])


def without_dropout(call: Ring) -> Ring:
    return replace(call, options={**call.options, "dropout_rate": 0.0})


def flash_tangent(
    call: Ring, given: Arrays, band: Band, outputs: tuple[Array, Array], moving: Arrays
) -> tuple[Array, Array]:
    """The terms of the keys of one call in the tangents of o and lse, which are `outputs`, of all keys."""
    prepared = _prepared(call, given, band)
    prepared = replace(prepared, spec=replace(prepared.spec, split=True))
    tangents = {name: x.reshape(prepared.named[name].shape) for name, x in moving.items()}
    named = dict(zip(("o", "lse"), outputs, strict=True))
    found = FlashAttention.tangent(prepared, named, tangents, call.options["config"])
    return found["o"], found["lse"]


def _prepared(call: Ring, given: Arrays, band: Band) -> Prepared:
    """The operands of one call, with a scale of each head and batch element, which no argument can be."""
    options = {name: x for name, x in call.options.items() if name != "config"} | given | sight(band)
    scale = given.get("softmax_scale")
    if scale is None or scale.ndim == 0:
        return FlashAttention.prepare_arguments(**options, return_lse=True)
    any_scale = jnp.ones((), scale.dtype)
    prepared = FlashAttention.prepare_arguments(**options | {"softmax_scale": any_scale}, return_lse=True)
    return replace(prepared, named={**prepared.named, "softmax_scale": scale})


def sight(band: Band) -> Arrays:
    """The options of flash_attention for a band."""
    left, right = band
    causal = right == 0
    window = None if left is None and (causal or right is None) else (left, None if causal else right)
    return dict(causal=causal, window=window)


def q_begins(call: Ring, of_devices: list[tuple[Part, ...]]) -> list[Array]:
    """The rows at which the parts of this device begin, as numbers that XLA does not know.

    Rows that are read and written at one such place are updated in place. Where they are constant XLA slices them, does
    not see that the slice and the update have one place, and writes the other rows too.
    """
    most = max(map(len, of_devices))
    begins = [[part.q_begin for part in parts] + [0] * (most - len(parts)) for parts in of_devices]
    device = lax.axis_index(call.axis_name)
    return [jnp.asarray(np.array(x, np.uint32))[device] for x in zip(*begins, strict=True)]


def dropouts(call: Ring, arrays: Arrays, hop: Hop) -> list[Array | None]:
    """For each part of this device in a hop the words of dropout, which counts places in the whole sequence."""
    (distance, of_devices), found = hop, []
    most = max(map(len, of_devices))
    if "dropout_key" not in arrays:
        return [None] * most
    shard = lambda name, device, begin: place(arrays[name].shape[1], call.size, call.layout, device, begin)
    step = call.size if call.layout == "striped" else 1
    device = lax.axis_index(call.axis_name)
    for n in range(most):
        places = [
            (shard("q", d, parts[n].q_begin), step, shard("k", (d - distance) % call.size, parts[n].k_begin), step)
            if n < len(parts)
            else (0, 1, 0, 1)
            for d, parts in enumerate(of_devices)
        ]
        found.append(with_places(arrays["dropout_key"], jnp.asarray(np.array(places, np.uint32))[device]))
    return found


def rows_from(x: Array, begin: Array, part: Part, axis: int) -> Array:
    """The rows of a part, from row `begin` on."""
    count = part.q_end - part.q_begin
    return x if count == x.shape[axis] else lax.dynamic_slice_in_dim(x, begin, count, axis)


def with_rows_from(x: Array, of_part: Array, begin: Array, axis: int) -> Array:
    """x with the rows of a part written to their place, from row `begin` on."""
    return of_part if of_part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, of_part, begin, axis)


def with_rows(x: Array, of_part: Array, part: Part, axis: int) -> Array:
    """x with the rows of a part written to their place."""
    if of_part.shape == x.shape:
        return of_part
    return lax.dynamic_update_slice_in_dim(x, of_part, part.q_begin, axis)


def rows_of(x: Array, part: Part, axis: int) -> Array:
    """The rows of a part."""
    return lax.slice_in_dim(x, part.q_begin, part.q_end, axis=axis)


def sinks_lse(arrays: Arrays) -> Array:
    """The logsumexp of the sinks of each head, [1, heads, 1]."""
    return jax.nn.logsumexp(arrays["sinks"], axis=-1)[:, :, None]


def alike(arrays: Arrays, *made: Array) -> list[Array]:
    """New arrays, cast to vary over the manual axes over which q varies."""
    axes = jax.typeof(arrays["q"]).manual_axis_type.varying
    missing = [axes - jax.typeof(x).manual_axis_type.varying for x in made]
    return [lax.pcast(x, tuple(sorted(m)), to="varying") if m else x for x, m in zip(made, missing, strict=True)]
