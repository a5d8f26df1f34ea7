"""A call of an operation over a mesh: `jax.shard_map` with specs by the names of its arrays."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..errors import type_error, value_error
from ..ops import Kernel


def over_mesh(
    operation: type[Kernel],
    run: Callable[[dict[str, Any]], Any],
    given: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """The results of `run` on the arguments of the lax API, whose arrays are split over a mesh by their specs."""
    operands = operation.algorithm.forward.table  # other arrays of rank 0 of NumPy are numbers, as softcap may be
    is_operand = lambda name, x: isinstance(x, np.ndarray) and (x.ndim > 0 or name in operands)
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, jax.Array) or is_operand(name, x)}
    specs = dict(in_specs) if isinstance(in_specs, Mapping) else _in_order(operation, arrays, in_specs)
    back = {new: old for old, new in operation.renamed.items()}
    specs = {back.get(name, name): spec for name, spec in specs.items()}
    if unknown := sorted(specs.keys() - arrays.keys()):
        raise value_error(
            operation.algorithm.name, f"in_specs names {', '.join(unknown)}, which is no array of this call"
        )
    specs = {name: specs.get(name, PartitionSpec()) for name in arrays}
    arrays, specs = operation.place(arrays, given, _with_query_heads(operation, arrays, specs))
    rest = {name: x for name, x in given.items() if name not in arrays}
    of_whole = {name: x for name, x in rest.items() if name != "axis_name"}
    _check_split(operation, arrays, of_whole, specs, mesh, rest.get("axis_name"))
    if any(0 in x.shape for x in arrays.values()):  # XLA cannot compile a `shard_map` that reads no array
        return _constrained(run({**arrays, **of_whole}), out_specs, mesh)
    local = jax.shard_map(
        lambda of: run({**of, **rest}), mesh=mesh, in_specs=({n: specs[n] for n in arrays},), out_specs=out_specs
    )
    return local(placed(arrays, specs, mesh))


def _constrained(results, out_specs, mesh):
    """The results of a call over a mesh, by `shard_map`."""
    is_spec = lambda x: isinstance(x, PartitionSpec)
    place = jax.sharding.reshard if _is_explicit(mesh) else jax.lax.with_sharding_constraint
    of_spec = lambda spec, x: jax.tree.map(lambda x: place(x, NamedSharding(mesh, spec)), x)
    return jax.tree.map(of_spec, out_specs, results, is_leaf=is_spec)


def _with_query_heads(operation, arrays, specs):
    """Raises unless query heads and key/value heads are split alike: otherwise a device would pair them wrongly."""
    if operation.algorithm.forward.layout.group is None:
        return specs
    of_heads = [name for name in ("q", "k", "v", "kv_pages") if name in arrays and len(arrays[name].shape) > 1]
    padded = {n: (*specs[n], *[None] * (len(arrays[n].shape) - len(specs[n]))) for n in of_heads}
    entry = next((spec[-2] for spec in padded.values() if spec[-2] is not None), None)
    heads = {name: arrays[name].shape[-2] for name in of_heads}
    if "kv_pages" in heads:  # a key and a value of each head
        heads["kv_pages"] = heads.get("k", heads["kv_pages"] // 2)
    split = {n: PartitionSpec(*spec[:-2], entry, spec[-1]) for n, spec in padded.items() if heads[n] > 1}
    return specs | split if entry is not None else specs


def _check_split(operation, arrays, rest, specs, mesh, axis_name):
    """Raises, as for Explicit axes, if an axis that must be whole is split: a device would treat its part as all of it.

    Over `axis_name` the operation itself communicates between devices. Devices have parts of equal size.
    """
    brought_together = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    sizes = {name: size for name, size in mesh.shape.items() if size > 1 and name not in brought_together}
    explicit = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    names = lambda entry: entry if isinstance(entry, tuple) else (entry,)
    within = lambda spec: PartitionSpec(*(tuple(n for n in names(entry) if n in sizes) or None for entry in spec))
    for name, x in arrays.items():
        _check_parts(operation, name, x, within(specs[name]), sizes)
    types = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(explicit, within(specs[name])))
        for name, x in arrays.items()
    }
    with jax.sharding.use_abstract_mesh(explicit):
        jax.eval_shape(lambda of: operation.prepare_arguments(**of, **rest).named, types)


def _check_parts(operation, name, x, spec, sizes):
    """Raises unless an array has the axes of its spec, in parts of equal size."""
    if len(spec) > x.ndim:
        raise value_error(operation.algorithm.name, f"the spec of {name} has {len(spec)} axes: {spec}", **{name: x})
    for axis, (size, entry) in enumerate(zip(x.shape, spec, strict=False)):
        devices = math.prod(sizes[n] for n in (entry if isinstance(entry, tuple) else (entry,)) if n is not None)
        if size % devices:
            raise value_error(
                operation.algorithm.name,
                f"axis {axis} of {name} is split over {devices} devices; its size {size} is no multiple of that",
                **{name: x},
            )


def _in_order(operation, arrays, in_specs):
    """The specs of a tuple by the names of the arrays."""
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, tuple | list):
        raise type_error(operation.algorithm.name, f"in_specs is {in_specs!r}; it must be a mapping by name or a tuple")
    if len(in_specs) > len(arrays):
        names = ", ".join(arrays)
        raise value_error(
            operation.algorithm.name, f"in_specs has {len(in_specs)} specs for {len(arrays)} arrays: {names}", **arrays
        )
    return dict(zip(arrays, in_specs, strict=False))


def placed(arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec], mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The arrays with the shardings of their specs, which `shard_map` requires on a mesh with Explicit axes."""
    if not _is_explicit(mesh):
        return dict(arrays)
    return {name: jax.sharding.reshard(x, jax.NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


def _is_explicit(mesh) -> bool:
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)
