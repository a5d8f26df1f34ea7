"""All-gathers and all-to-alls inside `jax.shard_map` over some of the axes of a mesh.

Over the other axes, such as that of the batch, arrays may be split as well, and XLA would gather them there before the
collective (jax 0.11.2). Explicit axes, by which the type says how an array is split, are made manual for it. Beside
Auto axes the collective is made of permutes, one for each other device, which XLA leaves split: they send as much. What
has to be equal on all devices by its type is a sum there, as the type of permuted arrays is that they differ.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType

from ...primitives._sharding import explicit_axes


def all_gather(x: Array, axis_name: Any, axis: int = 0, *, to: Literal["varying", "invarying"] = "varying") -> Array:
    """The arrays x of all devices, concatenated along an axis; "invarying" tells shard_map that devices agree on them.

    Beside Explicit axes the transpose, a reduce-scatter, would have no lowering, and gathering on a new axis would
    leave their entries one place early in the spec (both on jax 0.11.2).
    """
    if _has_auto_axes():
        return _by_permutes(lambda _: x, axis_name, axis) if to == "varying" else _by_sum(x, axis_name, axis)
    gather = lambda x: lax.all_gather(x, axis_name, axis=axis, tiled=True, to=to)
    return _beside_explicit_axes(gather, x, axis_name, (axis,))


def all_to_all(x: Array, axis_name: Any, split_axis: int, concat_axis: int) -> Array:
    """Part j of `split_axis` goes to device j; the parts of all devices are concatenated along `concat_axis`."""
    if not _has_auto_axes():
        exchange = lambda x: lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)
        return _beside_explicit_axes(exchange, x, axis_name, (split_axis, concat_axis))
    count = x.shape[split_axis] // lax.axis_size(axis_name)
    part_of = lambda device: lax.dynamic_slice_in_dim(x, device * count, count, split_axis)
    return _by_permutes(part_of, axis_name, concat_axis)


def is_checked(axis_name: Any) -> bool:
    """Whether the `shard_map` over that axis checks which arrays vary over it (check_vma)."""
    return bool(jax.typeof(lax.axis_index(axis_name)).manual_axis_type.varying)


def _beside_explicit_axes(collective: Callable[[Array], Array], x: Array, axis_name: Any, axes: Sequence[int]) -> Array:
    """The collective, which moves parts of `axes` of x: where these are split, it has to see all of them in order.

    The inner `shard_map` checks what the outer one does: else the cotangents have types that the outer does not know.
    """
    aval = jax.typeof(x)
    spec = aval.sharding.spec
    if not (explicit := explicit_axes(aval)) or any(spec[axis] is not None for axis in axes):
        return collective(x)
    over = dict(in_specs=spec, out_specs=spec, axis_names=set(explicit), check_vma=is_checked(axis_name))
    return jax.shard_map(collective, **over)(x)


def _has_auto_axes() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(mesh.shape[name] > 1 for name, kind in types if kind == AxisType.Auto)


def _by_permutes(part_of: Callable[[Array], Array], axis_name: Any, axis: int) -> Array:
    """What each device has for this one, `part_of(this one)` there, in the order of devices along an axis."""
    size, device, found = lax.axis_size(axis_name), lax.axis_index(axis_name), None
    for distance in range(size):
        part = part_of((device + distance) % size)
        if distance:
            part = lax.ppermute(part, axis_name, [(d, (d + distance) % size) for d in range(size)])
        if found is None:
            found = jnp.concatenate([jnp.zeros_like(part)] * size, axis)
        begin = (device - distance) % size * part.shape[axis]
        found = lax.dynamic_update_slice_in_dim(found, part, begin, axis)
    return found


def _by_sum(x: Array, axis_name: Any, axis: int) -> Array:
    """The arrays x of all devices, concatenated along an axis, each the sum of itself and zeros: one all-reduce."""
    whole = jnp.concatenate([jnp.zeros_like(x)] * lax.axis_size(axis_name), axis)
    begin = lax.axis_index(axis_name) * x.shape[axis]
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, x, begin, axis), axis_name)
