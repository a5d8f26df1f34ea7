"""vmap by folding: the mapped axis is merged into an axis of the primitive, and one kernel computes the whole batch.

An axis of size L, split into P major parts of L/P, gets the mapped axis N between the two:

    [N, L] → [P, N, L/P] → [P·N·L/P]

P = 1 puts N outermost, which needs no copy for a leading mapped axis. P = L puts it innermost, as a sharded axis needs.
Where devices split N too, P is the number of the parts of L, and the result is split over the devices of both: each
device folds what it has. P = G folds N into the query heads of each group, so that unmapped keys and values are shared
rather than repeated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import value_error
from ._axes import Axes, Table, is_broadcast, position
from ._sharding import Layout, explicit_axes, names_of, resharded


@dataclass(frozen=True)
class Fold:
    """The fold of a mapped axis of size `count` into axis `letter` of size `size`, after `major` major parts.

    `entry` and `over` are those of this and of the mapped axis in the Explicit shardings of the operands, None where
    they are whole.
    """

    letter: str
    count: int
    size: int
    major: int
    entry: Any
    over: Any

    @property
    def is_of_both(self) -> bool:
        """Whether devices split both axes, each by mesh axes of its own."""
        return None not in (self.entry, self.over) and set(names_of(self.entry)).isdisjoint(names_of(self.over))


def choose(
    table: Table, layout: Layout, arrays: Mapping[str, Any], dims: Mapping[str, int | None], results: Sequence[str]
) -> Fold:
    """The fold into the query heads if that avoids repeating shared keys and values, else into the batch.

    A sharded mapped axis is folded into the batch: among the heads, its parts would have to move between devices.
    """
    mapped_axes = [(arrays[name], dim) for name, dim in dims.items() if dim is not None]
    count = next(x.shape[dim] for x, dim in mapped_axes)
    over = next((entry for x, dim in mapped_axes if (entry := _spec(x)[dim]) is not None), None)
    shapes = {name: _without(x.shape, dims[name]) for name, x in arrays.items()}

    def size_of(letter: str) -> int:
        found = [shapes[n][i] for n in arrays if (i := position(table[n], letter)) is not None]
        return 0 if 0 in found else max(found, default=1)

    if layout.group is not None and over is None:
        heads, groups = layout.group
        shared = {name for name in arrays if position(table[name], groups) is not None}
        mapped = {name for name in arrays if dims[name] is not None}
        spread = {n for n in arrays if (i := position(table[n], heads)) is not None and shapes[n][i] == size_of(heads)}
        if shared and not shared & mapped and mapped <= spread and all(_is_whole(table[r], heads) for r in results):
            entries = [_entry(table, letter, arrays, dims) for letter in layout.group]
            entry = next((x for x in entries if x is not None), None)
            # All heads share a single key/value head, in any order.
            major = size_of(heads) if entry is not None and size_of(groups) == 1 else size_of(groups)
            return Fold(heads, count, size_of(heads), major, entry, over)
    batch, entry = size_of(layout.fold), _entry(table, layout.fold, arrays, dims)
    fold = Fold(layout.fold, count, batch, 1 if entry is None else batch, entry, over)
    if not fold.is_of_both:
        return fold
    mesh = next(jax.typeof(x).sharding.mesh for x, dim in mapped_axes if _spec(x)[dim] is not None)
    return replace(fold, major=math.prod(mesh.shape[name] for name in names_of(entry)))


def fold_operand(x: Any, dim: int | None, of: Axes, fold: Fold, *, paired: bool) -> Any:
    """An operand with the mapped axis folded in; an unmapped one is broadcast only if it has to be."""
    at = position(of, fold.letter)
    if at is None:
        if dim is None:
            return x
        raise NotImplementedError("an operand without the folded axis is mapped")  # choose() never folds so
    if dim is None:
        if is_broadcast(of[at], x.shape[at]) and not paired:
            return x
        x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], fold.count, *x.shape[at:]))
    else:
        x = jnp.moveaxis(x, dim, at)
    if x.shape[at + 1] != fold.size:
        x = jnp.broadcast_to(x, (*x.shape[: at + 1], fold.size, *x.shape[at + 2 :]))
    if fold.is_of_both and any(_spec(x)[at : at + 2]):
        x = _placed(x, at, fold.over, fold.entry)
    x = reshape_axes(x, at + 1, 1, (fold.major, fold.size // fold.major), None if fold.entry is None else 0)
    return reshape_axes(jnp.swapaxes(x, at, at + 1), at, 3, (fold.count * fold.size,))


def unfold_result(x: Any, of: Axes, fold: Fold, size: int) -> Any:
    """A result with the mapped axis as its first one again; `size` is that of the axis without the folded one."""
    at = position(of, fold.letter)
    parts = (fold.major, fold.count, fold.size // fold.major)
    if fold.is_of_both and _spec(x)[at] is not None:
        spec = PartitionSpec(*_spec(x)[:at], fold.entry, fold.over, None, *_spec(x)[at + 1 :])
        sharding = NamedSharding(jax.typeof(x).sharding.mesh, spec)
        x = jax.lax.reshape(x, (*x.shape[:at], *parts, *x.shape[at + 1 :]), out_sharding=sharding)
    else:
        x = reshape_axes(x, at, 1, parts, 1 if fold.entry is None else 0)
    x = reshape_axes(jnp.swapaxes(x, at, at + 1), at + 1, 2, (fold.size,))
    if size != fold.size:  # the cotangent of an operand that was broadcast along this axis
        x = x.sum(at + 1, keepdims=True, dtype=x.dtype)
    elif fold.entry is not None and is_broadcast(of[at], size):  # on one device: an axis of size 1 counts as broadcast
        x = _placed(x, at + 1, None)
    x = jnp.moveaxis(x, at, 0)
    # A folded axis of size 1 that may be broadcast is whole.
    return x if fold.over is None else _placed(x, 0, fold.over)


def _placed(x: Any, at: int, *entries: Any) -> Any:
    """An array on an Explicit mesh with these entries for the axes from `at`."""
    spec = _spec(x)
    wanted = (*spec[:at], *entries, *spec[at + len(entries) :])
    if wanted == spec:
        return x
    return resharded(x, {"x": x}, (("x", NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*wanted))),))["x"]


def split_axis(operation: str, name: str, x: Any, at: int, given: tuple[int, ...], target: int, what: str) -> Any:
    """Replaces axis `at` of an operand by axes of sizes `given`, of which `target` gets the mesh axes of a sharded one.

    Raises if these do not divide it; `what` says of what it is the number.
    """
    aval = jax.typeof(x)
    entry = _spec(x)[at]
    parts = math.prod(aval.sharding.mesh.shape[mesh_axis] for mesh_axis in names_of(entry))
    if entry is not None and given[target] % parts:
        raise value_error(
            operation,
            f"{given[target]} {what} cannot be sharded over the {parts} devices of {entry!r}; use fewer devices",
            **{name: x},
        )
    return reshape_axes(x, at, 1, given, target)


def reshape_axes(x: Any, at: int, taken: int, given: tuple[int, ...], target: int | None = None) -> Any:
    """Replaces `taken` axes from `at` by axes of sizes `given`; `target` gets the mesh axes of sharded axes.

    It is by default the first that is not 1.
    """
    new = (*x.shape[:at], *given, *x.shape[at + taken :])
    aval = jax.typeof(x)
    if not explicit_axes(aval):
        return x.reshape(new)
    spec = _spec(x)
    entries = [entry for entry in spec[at : at + taken] if entry is not None]
    if target is None:
        target = next((i for i, size in enumerate(given) if size != 1), 0)
    names = tuple(name for entry in entries for name in names_of(entry))
    joined = entries[0] if len(entries) == 1 else names or None
    kept = [joined if i == target else None for i in range(len(given))]
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*spec[:at], *kept, *spec[at + taken :]))
    return jax.lax.reshape(x, new, out_sharding=sharding)


def _without(shape: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    return shape if dim is None else shape[:dim] + shape[dim + 1 :]


def _is_whole(of: Axes, letter: str) -> bool:
    at = position(of, letter)
    return at is not None and not of[at].optional


def _entry(table: Table, letter: str, arrays: Mapping[str, Any], dims: Mapping[str, int | None]) -> Any:
    """The entry of an axis in the shardings of the operands; None where it is whole in all of them."""
    places = {name: at for name in arrays if (at := position(table[name], letter)) is not None}
    entries = (_without(_spec(arrays[name]), dims[name])[at] for name, at in places.items())
    return next((entry for entry in entries if entry is not None), None)


def _spec(x: Any) -> tuple[Any, ...]:
    """The entry of each axis in an Explicit sharding."""
    aval = jax.typeof(x)
    spec = tuple(aval.sharding.spec) if explicit_axes(aval) else ()
    return spec + (None,) * (x.ndim - len(spec))
