"""Which axes of an operation may be split over devices, and how the results are split if its operands are.

Along the axes in `Layout.split` an operation is independent, as every batch element or head is computed by itself. All
other axes must be whole. Query heads and key/value heads are split together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..errors import value_error
from ._axes import Axes, Table, is_broadcast


@dataclass(frozen=True)
class Layout:
    """How the axes of an operation take part in folding and splitting.

    Attributes:
        fold: the axis into which `vmap` folds.
        split: axes that may be split over devices.
        group: (h, g): h query heads share g key/value heads, h = g · repeat; None without such a pair.
        advice: what to do when another axis is split.
    """

    fold: str = "b"
    split: tuple[str, ...] = ("b", "h", "g")
    group: tuple[str, str] | None = ("h", "g")
    advice: str = "gather it first"


Split = dict[str, Any]  # letter -> an entry of a PartitionSpec


def explicit_axes(aval: Any) -> frozenset[str]:
    """The mesh axes of `aval` whose sharding is part of its type."""
    return explicit_axes_of(aval.sharding.mesh)


def explicit_axes_of(mesh: Any) -> frozenset[str]:
    """The Explicit axes of a mesh."""
    if mesh.empty:
        return frozenset()
    return frozenset(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit)


def names_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def joined(
    operation: str, table: Table, layout: Layout, operands: Mapping[str, Any], specs: Mapping[str, Any], mesh: Any
) -> Split:
    """The split of each letter, from the specs of all operands; raises if they contradict each other."""
    split: Split = {}
    size_of: dict[str, int] = {}
    for name, x in operands.items():
        entries = tuple(specs[name]) + (None,) * (len(x.shape) - len(specs[name]))
        for axis, size, entry in zip(table[name], x.shape, entries, strict=True):
            size_of[axis.letter] = max(size, size_of.get(axis.letter, 1))
            if entry is None or is_broadcast(axis, size):
                continue
            if axis.letter not in layout.split:
                raise value_error(
                    operation,
                    f"axis {axis.letter} of {name} is sharded over {entry!r}; it must be whole: {layout.advice}",
                    **{name: x},
                )
            if split.setdefault(axis.letter, entry) != entry:
                raise value_error(
                    operation,
                    f"axis {axis.letter} is sharded over {split[axis.letter]!r} and, in {name}, over {entry!r}; "
                    "the operands must agree",
                    **{name: x},
                )
    _refuse_reuse(operation, layout, split)
    return _with_groups(operation, layout, split, size_of, mesh)


def _refuse_reuse(operation: str, layout: Layout, split: Split) -> None:
    """Raises if a mesh axis splits more than one axis of the operation, other than the heads of both kinds."""
    owner: dict[str, str] = {}
    for letter, entry in split.items():
        for name in names_of(entry):
            other = owner.setdefault(name, letter)
            if other != letter and {letter, other} != set(layout.group or ()):
                raise value_error(
                    operation,
                    f"axes {other} and {letter} are both sharded over {name!r}; a mesh axis splits one of them",
                )


def _with_groups(operation: str, layout: Layout, split: Split, size_of: Mapping[str, int], mesh: Any) -> Split:
    """The split with query heads and key/value heads split alike; a single key/value head stays whole."""
    if layout.group is None or not (split.keys() & set(layout.group)):
        return split
    heads, groups = layout.group
    entry = split.get(groups, split.get(heads))
    if split.get(heads, entry) != entry:
        raise value_error(operation, f"heads are sharded over {split[heads]!r} but key/value heads over {entry!r}")
    parts = 1
    for name in names_of(entry):
        parts *= mesh.shape[name]
    if size_of.get(groups, 1) == 1:
        return {letter: e for letter, e in split.items() if letter != groups} | {heads: entry}
    if size_of[groups] % parts:
        raise value_error(
            operation,
            f"{size_of[groups]} key/value heads cannot be sharded over the {parts} devices of {entry!r}; "
            "repeat them or use fewer devices",
        )
    return split | {heads: entry, groups: entry}


def partition_spec(of: Axes, shape: tuple[int, ...], split: Split) -> PartitionSpec:
    """The spec of one operand or result."""
    return PartitionSpec(
        *(None if is_broadcast(axis, size) else split.get(axis.letter) for axis, size in zip(of, shape, strict=True))
    )


def aligned(operation: str, table: Table, layout: Layout, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with consistent Explicit shardings, as a primitive needs them.

    An array that is whole along an axis that others split is resharded: each device takes its part of what it has.
    """
    types = {name: jax.typeof(x) for name, x in arrays.items()}
    placed = next((name for name, aval in types.items() if explicit_axes(aval)), None)
    if placed is None:
        return dict(arrays)
    mesh = types[placed].sharding.mesh
    specs = {name: aval.sharding.spec if explicit_axes(aval) else PartitionSpec() for name, aval in types.items()}
    split = joined(operation, table, layout, arrays, specs, mesh)
    wanted = {name: partition_spec(table[name], x.shape, split) for name, x in arrays.items()}
    same = lambda a, b, ndim: tuple(a) + (None,) * (ndim - len(a)) == tuple(b)
    moved = {n: NamedSharding(mesh, of) for n, of in wanted.items() if not same(specs[n], of, types[n].ndim)}
    if not moved:
        return dict(arrays)
    return {**arrays, **resharded(arrays[placed], {n: arrays[n] for n in moved}, tuple(moved.items()))}


@partial(jax.jit, static_argnums=2, inline=True, keep_unused=True)
def resharded(placed: Any, arrays: dict[str, Any], to: tuple[tuple[str, NamedSharding], ...]) -> dict[str, Any]:
    """The arrays, resharded in a program on the devices of `placed`, as types do not determine devices."""
    return {name: jax.sharding.reshard(arrays[name], sharding) for name, sharding in to}


def summed_over(of: Axes, shape: tuple[int, ...], split: Split) -> tuple[str, ...]:
    """The mesh axes that split the work but not this result, of which each device holds a part of the sum."""
    kept = {name for entry in partition_spec(of, shape, split) for name in names_of(entry)}
    return tuple(sorted({name for entry in split.values() for name in names_of(entry)} - kept))


def shardy_rule(table: Table, layout: Layout, operands: Mapping[str, Any], results: Mapping[str, Any]) -> tuple:
    """The rule of `custom_partitioning` in its string form, the factors that must stay whole, and factor sizes.

    Query heads are the compound factor (g r) with r = h // g, or, as Shardy requires, the one of both that is not 1; a
    broadcast axis gets its own factor.
    """
    named: list[str] = []
    size_of = {a.letter: s for n, x in operands.items() for a, s in zip(table[n], x.shape, strict=True) if s != 1}
    heads, groups = layout.group or (None, None)
    repeat = size_of.get(heads, 1) // size_of.get(groups, 1)
    head_factors = ["r"] if size_of.get(groups, 1) == 1 else ["g", "r"] if repeat > 1 else ["g"]

    def factor(name: str, index: int, letter: str, size: int) -> str:
        if (size == 1 and size_of.get(letter, 1) != 1) or letter.isdigit():
            named.append(f"{name}_{index}")
            return named[-1]
        parts = head_factors if letter == heads and groups is not None else [letter]
        named.extend(part for part in parts if part not in named)
        return f"({' '.join(parts)})" if len(parts) > 1 else parts[0]

    def side(arrays: Mapping[str, Any]) -> str:
        return ", ".join(
            " ".join(factor(n, i, axis.letter, s) for i, (axis, s) in enumerate(zip(table[n], x.shape, strict=True)))
            for n, x in arrays.items()
        )

    rule = f"{side(operands)} -> {side(results)}"
    free = {"r"} | {letter for letter in layout.split if letter != heads}
    factors = {"r": repeat} if "(g r)" in rule else {}
    return rule, tuple(name for name in named if name not in free), factors
