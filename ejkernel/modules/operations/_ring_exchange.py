"""Attention over a sharded sequence after one exchange: with all keys, or with more tokens of fewer heads.

all_gather and ulysses consist of exact calls of `flash_attention` and save for a backward what it saves, except the
keys and values of all devices, which a backward gathers again. usp is a ring of what it exchanges.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._attention import segment_ids
from ._collectives import all_gather as all_gathered
from ._collectives import all_to_all
from ._dropout import with_places
from ._ring import ring
from ._ring_hop import Arrays, Ring, flash, sight
from ._ring_layout import Band
from .flash_attention import FlashAttention

NAME = "ring_attention"
_KEPT = ("flash_attention_o", "flash_attention_lse")


def one_device(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse if one device has the whole sequence: one call of flash_attention."""
    return _flash(call, arrays, call.band)


def no_pairs(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse if there are no queries or no keys on any device: flash_attention without communication."""
    local = lambda x: x if x.shape[3] == 1 else x[..., : arrays["k"].shape[1]]
    return _flash(call, arrays | {name: local(arrays[name]) for name in ("bias", "mask") if name in arrays}, call.band)


# --- The keys of all devices -----------------------------------------------------------------------------------------


def all_gather(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse of the queries of this device over the keys of all devices, gathered, and again in a backward."""
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT)
    return jax.checkpoint(lambda arrays: _with_all_keys(call, arrays), policy=policy)(arrays)


def _with_all_keys(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    gathered = lambda x: _in_sequence(all_gathered(x, call.axis_name, axis=1), 1, call)
    whole = {name: gathered(arrays[name]) for name in ("k", "v", "kv_segment_ids") if name in arrays}
    whole |= {name: _in_sequence(arrays[name], 3, call) for name in ("bias", "mask") if name in arrays}
    arrays = {**arrays, **whole}
    count, device = arrays["q"].shape[1], lax.axis_index(call.axis_name)
    if call.layout == "striped":
        return _rows_with_all_keys(call, arrays, slice(0, count), device, call.size)
    if call.layout == "contiguous" or (call.band == (None, None) and "dropout_key" not in arrays):
        return _rows_with_all_keys(call, arrays, slice(0, count), device * count)
    half = count // 2
    chunks = ((slice(0, half), device), (slice(half, count), 2 * call.size - 1 - device))
    results = [_rows_with_all_keys(call, arrays, rows, chunk * half) for rows, chunk in chunks]
    return tuple(jnp.concatenate(x, axis) for x, axis in zip(zip(*results, strict=True), (1, 2), strict=True))


def _rows_with_all_keys(call: Ring, arrays: Arrays, rows: slice, first: Array, step: int = 1) -> tuple[Array, Array]:
    """o and lse of some rows, which have positions from `first` on, a step apart; with a band the step is 1."""
    given = dict(arrays) | _dropout(arrays, first, step)
    for name, axis in (("q", 1), ("q_segment_ids", 1), ("bias", 2), ("mask", 2)):
        if name in given and given[name].shape[axis] > 1:
            given[name] = given[name][:, rows] if axis == 1 else given[name][:, :, rows]
    if call.band == (None, None):
        return _flash(call, given, call.band)
    q, k, (left, right) = given["q"], given["k"], call.band
    keys = k.shape[1]
    if (
        right == 0
        and not call.options["batch_invariant"]
        and given.keys().isdisjoint(("q_segment_ids", "bias", "mask"))
    ):
        return _packed(call, given, left, first + q.shape[1] + keys - call.size * arrays["q"].shape[1])
    after = keys if right is None else min(right, keys)
    # Roll the keys so that the last one is aligned with the last query: flash_attention's band is relative to it.
    length, end = keys + after, first + q.shape[1] + after + keys - call.size * arrays["q"].shape[1]
    position = end - length + jnp.arange(length, dtype=end.dtype)
    given |= _dropout(arrays, first, step, end - length)
    last = lambda x, axis: x if x.shape[axis] == 1 < keys else _rolled(x, axis, after, end)
    given |= {name: last(given[name], 1) for name in ("k", "v")}
    given |= {name: last(given[name], 3) for name in ("bias", "mask") if name in given}
    q_ids, kv_ids = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
    if "q_segment_ids" in given:
        q_ids, kv_ids = segment_ids(NAME, given["q_segment_ids"], given["kv_segment_ids"], q, k)
    hidden = (position < 0) | (position >= keys)
    given |= dict(q_segment_ids=q_ids, kv_segment_ids=jnp.where(hidden[None], -1, _rolled(kv_ids, 1, after, end)))
    return _flash(call, given, (None if left is None else left + after, 0))


def _dropout(arrays: Arrays, first: Array, step: int, first_key: Array | int = 0) -> Arrays:
    """The words of dropout for rows of these positions and consecutive keys; nothing without dropout."""
    if "dropout_key" not in arrays:
        return {}
    places = jnp.stack([jnp.asarray(x).astype(jnp.uint32) for x in (first, step, first_key, 1)])
    return {"dropout_key": with_places(arrays["dropout_key"], places)}


def _packed(call: Ring, given: Arrays, left: int | None, end: Array) -> tuple[Array, Array]:
    """o and lse under a causal mask by which the last query is aligned with the key before `end`.

    The queries, and the keys up to there, are one packed sequence: where it ends may be an array, and no key is moved.
    """
    given = _of_one_call(given)
    options = {name: x for name, x in call.options.items() if name != "config"} | given | sight((left, 0))
    prepared = FlashAttention.prepare_arguments(**options, return_lse=True)
    cut = lambda end: jnp.array([[0, 1]], jnp.int32) * end
    ends = dict(cu_seqlens_q=cut(given["q"].shape[1]), cu_seqlens_k=cut(jnp.maximum(end, 0)))
    return FlashAttention.run_prepared(replace(prepared, named={**prepared.named, **ends}), call.options["config"])


def _rolled(x: Array, axis: int, after: int, end: Array) -> Array:
    """x padded by `after` and rolled along the axis so that the element before index `end` is last."""
    widths = [(0, after if n == axis else 0) for n in range(x.ndim)]
    x = jnp.pad(x, widths)
    length = x.shape[axis]
    return lax.dynamic_slice_in_dim(jnp.concatenate([x, x], axis), end % length, length, axis)


# --- More tokens of fewer heads --------------------------------------------------------------------------------------


def ulysses(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse by exchanges after which each device has all tokens of a part of the heads (DeepSpeed-Ulysses)."""
    return _of_heads(call, arrays, lambda given: _flash(call, given, call.band))


def usp(call: Ring, arrays: Arrays) -> tuple[Array, Array]:
    """o and lse by a ring over the first axis, of the tokens that devices along the others exchange for heads.

    The chunks in zigzag of these devices, put in order, are the two chunks of one device of the ring.
    """
    across, *within = call.axis_name
    size = lax.axis_size(across)
    of_ring = replace(call, axis_name=across, size=size)
    of_exchange = replace(call, axis_name=tuple(within), size=call.size // size)
    return _of_heads(of_exchange, arrays, partial(ring, of_ring))


def _of_heads(call: Ring, arrays: Arrays, attend: Callable[[Arrays], tuple[Array, Array]]) -> tuple[Array, Array]:
    """o and lse by `attend`, on which each device has the tokens of all devices and its part of the heads."""

    def heads(x: Array) -> Array:
        return _in_sequence(all_to_all(x, call.axis_name, 2, 1), 1, call)

    def tokens(x: Array, axis: int) -> Array:
        return all_to_all(_in_shards(x, axis, call), call.axis_name, axis, 3 - axis)

    def columns(x: Array) -> Array:
        groups = x if x.shape[3] == 1 else x.reshape(*x.shape[:3], -1, call.size * arrays["k"].shape[1])
        return _in_sequence(groups, groups.ndim - 1, call).reshape(x.shape)

    gathered = lambda x: _in_sequence(all_gathered(x, call.axis_name, axis=1), 1, call)
    given = {name: heads(arrays[name]) for name in "qkv"}
    given |= {name: gathered(arrays[name]) for name in ("q_segment_ids", "kv_segment_ids") if name in arrays}
    count = arrays["q"].shape[2] // call.size
    own = lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index(call.axis_name) * count, count, 1)
    given |= {name: own(arrays[name]) for name in ("sinks", "dropout_key") if name in arrays}
    # Those of which all rows are equal.
    pairs = {name: arrays[name] for name in ("bias", "mask") if name in arrays}
    given |= {name: columns(x if x.shape[1] == 1 else own(x)) for name, x in pairs.items()}
    given |= {name: arrays[name] for name in ("softmax_scale",) if name in arrays}
    o, lse = attend(given)
    return tokens(o, 1), tokens(lse, 2)


# --- Pieces ----------------------------------------------------------------------------------------------------------


def _flash(call: Ring, given: Arrays, band: Band) -> tuple[Array, Array]:
    return flash(call, _of_one_call(given), band)


def _of_one_call(given: Arrays) -> Arrays:
    """The arrays as flash_attention takes them: sinks without an axis of the batch."""
    return {**given, "sinks": given["sinks"][0]} if "sinks" in given else given


def _in_sequence(x: Array, axis: int, call: Ring) -> Array:
    """Tokens in the order of devices, permuted to the order of the sequence; axes of size 1 are unchanged."""
    if x.shape[axis] == 1 or call.layout == "contiguous":
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if call.layout == "striped":
        return x.reshape(*before, call.size, -1, *after).swapaxes(axis, axis + 1).reshape(x.shape)
    halves = x.reshape(*before, call.size, 2, -1, *after)
    first, second = (lax.index_in_dim(halves, n, axis + 1, keepdims=False) for n in range(2))
    return jnp.concatenate([first, lax.rev(second, (axis,))], axis).reshape(x.shape)


def _in_shards(x: Array, axis: int, call: Ring) -> Array:
    """Tokens in the order of the sequence, permuted to the order of devices."""
    if call.layout == "contiguous":
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if call.layout == "striped":
        return x.reshape(*before, -1, call.size, *after).swapaxes(axis, axis + 1).reshape(x.shape)
    halves = x.reshape(*before, 2, call.size, -1, *after)
    first, second = (lax.index_in_dim(halves, n, axis, keepdims=False) for n in range(2))
    return jnp.stack([first, lax.rev(second, (axis,))], axis + 1).reshape(x.shape)
