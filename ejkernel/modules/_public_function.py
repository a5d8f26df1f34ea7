"""The functions of the modules API: operations under its option names, with `platform=` and `mesh=`."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ..errors import type_error, value_error
from ..kernels._registry import kernel_registry
from ..ops import default_executor
from ..types import ConfigLike, Platform
from ._operation import Operation, lax_arguments, modules_names, modules_parameters
from ._signatures import annotations_of, result_type
from .operations._arguments import config_of

_SPECS = Mapping[str, PartitionSpec] | tuple[PartitionSpec, ...] | list[PartitionSpec]
OWN_PARAMETERS = {
    "platform": Platform | str | None,
    "cfg": ConfigLike | None,
    "mesh": Mesh | AbstractMesh | None,
    "in_specs": _SPECS | None,
    "out_specs": PartitionSpec | tuple[PartitionSpec, ...] | list[PartitionSpec] | None,
}


def public_function(operation: type[Operation]) -> Callable[..., Any]:
    """The function of an operation in `ejkernel.modules`."""
    name = operation.algorithm.name
    parameters = modules_parameters(operation)
    own = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=x)
        for n, x in OWN_PARAMETERS.items()
    ]
    signature = inspect.Signature([*parameters, *own], return_annotation=result_type(operation))

    def call(*args, platform=None, cfg=None, mesh=None, in_specs=None, out_specs=None, **kwargs):
        given = lax_arguments(operation, args, kwargs)

        def prepare(arguments):
            with modules_names(operation):
                return operation.invocation(**arguments, platform=platform)

        def run(arguments):
            config = config_of(name, cfg, operation.config_class)
            return default_executor().call(lambda: prepare(arguments), config)

        if mesh is None:
            if in_specs is not None or out_specs is not None:
                raise value_error(name, "in_specs and out_specs are given without a mesh")
            return run(given)
        if in_specs is None or out_specs is None:
            raise value_error(name, "a mesh is given without in_specs and out_specs")
        return _over_mesh(operation, run, given, mesh, in_specs, out_specs)

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__signature__ = "ejkernel.modules", signature
    call.__annotations__ = annotations_of(signature)
    call.__doc__ = _doc(operation)
    kernel_registry.register_operation(name, call)
    return call


def _over_mesh(operation, run, given, mesh, in_specs, out_specs):
    arrays = {name: jnp.asarray(x) for name, x in given.items() if isinstance(x, jax.Array | np.ndarray)}
    with modules_names(operation):
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
    return local(_placed(arrays, specs, mesh))


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


def _placed(arrays, specs, mesh):
    """The arrays with the shardings of their specs, which `shard_map` requires on a mesh with Explicit axes."""
    if not _is_explicit(mesh):
        return arrays
    return {name: jax.sharding.reshard(x, jax.NamedSharding(mesh, specs[name])) for name, x in arrays.items()}


def _is_explicit(mesh) -> bool:
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)


def _doc(operation: type[Operation]) -> str:
    renamed = ", ".join(f"{new} ({old})" for old, new in operation.renamed.items())
    name = operation.algorithm.name
    return (
        f"`ejkernel.lax.{name}`, which documents its mathematics and shapes, with a choice of platform and mesh.\n\n"
        f"Options that are renamed here: {renamed or 'none'}.\n\n"
        "Args:\n"
        '    platform: "triton", "pallas", "cuda", "cute" or "xla": only that platform; None or "auto" for the best.\n'
        f"    cfg: a {operation.config_class.__name__} or a mapping of its fields, in place of the chosen one;\n"
        "        `ejkernel.explain` shows the values of `algorithm`. A pair configures the forward and the backward\n"
        "        of a gradient.\n"
        "    mesh: runs under `jax.shard_map` on this mesh.\n"
        "    in_specs: PartitionSpecs by array name, or a tuple in the order of the arrays; others are replicated.\n"
        "    out_specs: the PartitionSpec of the result, or a tuple of them.\n"
    )
