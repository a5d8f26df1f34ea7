"""The program of a call: the operation, its derivative, its maps, and the mesh that it runs on."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel
from ejkernel.modules._operation import OPERATIONS

from .calls import Call
from .operations._draws import shape_of

# --- Derivatives: f(arrays) -> results, and which operands move -> f(arrays, cotangents, tangents) --------------------


def none(f: Callable, wrt: tuple) -> Callable:
    return lambda arrays, u, t: f(arrays)


def vjp(f: Callable, wrt: tuple) -> Callable:
    """(results, Jᵀ·u)."""

    def run(arrays, u, t):
        results, pull = jax.vjp(lambda moving: f(arrays | moving), {name: arrays[name] for name in wrt})
        return results, pull(u)[0]

    return run


def checkpoint(f: Callable, wrt: tuple) -> Callable:
    return vjp(jax.checkpoint(f), wrt)


def checkpoint_saving_kernels(f: Callable, wrt: tuple) -> Callable:
    return vjp(jax.checkpoint(f, policy=ejkernel.checkpoint_policies.save_kernels), wrt)


def jvp(f: Callable, wrt: tuple) -> Callable:
    """(results, J·t)."""
    return lambda arrays, u, t: jax.jvp(lambda moving: f(arrays | moving), ({n: arrays[n] for n in wrt},), (t,))


def linearize(f: Callable, wrt: tuple) -> Callable:
    def run(arrays, u, t):
        results, push = jax.linearize(lambda moving: f(arrays | moving), {name: arrays[name] for name in wrt})
        return results, push(t)

    return run


def jvp_of_vjp(f: Callable, wrt: tuple) -> Callable:
    """The change of Jᵀ·u along t."""
    return lambda arrays, u, t: jvp(lambda x: vjp(f, wrt)(x, u, t)[1], wrt)(arrays, u, t)[1]


def vjp_of_vjp(f: Callable, wrt: tuple) -> Callable:
    """The same, as second derivatives commute: the gradient of ⟨t, Jᵀ·u⟩."""
    return lambda arrays, u, t: vjp(lambda x: vjp(f, wrt)(x, u, t)[1], wrt)(arrays, t, None)[1]


def vjp_of_jvp(f: Callable, wrt: tuple) -> Callable:
    """The same: the gradient of ⟨u, J·t⟩."""
    return lambda arrays, u, t: vjp(lambda x: jvp(f, wrt)(x, u, t)[1], wrt)(arrays, u, None)[1]


DERIVATIVES = {
    f.__name__: f
    for f in (
        none,
        vjp,
        checkpoint,
        checkpoint_saving_kernels,
        jvp,
        linearize,
        jvp_of_vjp,
        vjp_of_vjp,
        vjp_of_jvp,
    )
}
SECOND = ("jvp_of_vjp", "vjp_of_vjp", "vjp_of_jvp")
SAME = {"checkpoint": "vjp", "checkpoint_saving_kernels": "vjp", "linearize": "jvp"}
SAME |= {"vjp_of_vjp": "jvp_of_vjp", "vjp_of_jvp": "jvp_of_vjp"}
"""Derivatives that are the same numbers as another one."""


# --- The program ------------------------------------------------------------------------------------------------------


def operation(call: Call) -> Callable:
    """arrays -> list of results, by the API of the call."""
    options = dict(call.options)

    function = lambda arrays: jax.tree.leaves(getattr(ejkernel.lax, call.operation)(**arrays, **options))
    if hasattr(call.module, "OVER"):
        function = over_mesh(call, function)

    def lax(arrays):
        if "dropout_key" in arrays:
            key = jax.random.wrap_key_data(jnp.stack(_words(arrays["dropout_key"])), impl="threefry2x32")
            arrays = arrays | {"dropout_key": key}
        return function(arrays)

    def modules(arrays):
        names = OPERATIONS[call.operation].renamed | {"config": "cfg"}
        given = {names.get(name, name): x for name, x in (arrays | options).items()}
        function = getattr(ejkernel.modules, call.operation)
        return jax.tree.leaves(function(**given, **_mesh_arguments(call), platform=call.platform))

    return WITHIN[call.within](lax if call.api == "lax" else modules)


def _scanned(f: Callable) -> Callable:
    return lambda arrays: [y[1] for y in jax.lax.scan(lambda carry, _: (carry, f(arrays)), (), length=2)[1]]


def _mapped(f: Callable) -> Callable:
    """By `jax.lax.map`, over doubled arrays."""
    return lambda arrays: [y[1] for y in jax.lax.map(f, jax.tree.map(lambda x: jnp.stack([x, x]), arrays))]


def _chosen(f: Callable) -> Callable:
    nothing = lambda arrays: [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(f, arrays)]
    return lambda arrays: jax.lax.cond(jnp.asarray(True), f, nothing, arrays)


WITHIN = {"": lambda f: f, "scan": _scanned, "map": _mapped, "cond": _chosen}
"""What is around the operation, which computes the same numbers."""


def _words(seed):
    """The words of `jax.random.key(seed)` for threefry: those of a 64-bit number."""
    seed = jnp.asarray(seed, jnp.uint32)
    return jnp.zeros_like(seed), seed


def program(call: Call) -> Callable:
    """(arrays, cotangents, tangents) -> results, with all transforms of the call."""
    f, derive = operation(call), DERIVATIVES[call.derivative]
    if call.outside:
        for level in range(len(call.maps)):
            f = jax.vmap(f, (_axes(call, level, call.operands),))
        f = derive(f, call.wrt)
    else:
        f = derive(f, call.wrt)
        for level in range(len(call.maps)):
            directions = (0 if call.is_mapped(of, level) else None for of in ("cotangents", "tangents"))
            f = jax.vmap(f, (_axes(call, level, call.operands), *directions))
    return jax.jit(f) if call.jit else f


def _axes(call: Call, level: int, names) -> dict[str, int | None]:
    return {name: call.maps[level].get(name) for name in names}


def arguments(call: Call) -> tuple[dict, list | None, dict | None]:
    """The arrays, cotangents and tangents of all examples, on the devices of the call."""
    arrays = call.batch()
    cotangents = tangents = None
    if call.derivative != "none":
        types = [jax.ShapeDtypeStruct(shape_of(call, axes), dtype) for axes, dtype in call.module.results(call)]
        heard = call.poison and call.derivative not in ("vjp_of_vjp", "vjp_of_jvp")  # which multiply NaN by 0
        cotangents = list(call.directions("cotangents", dict(enumerate(types)), poison=heard).values())
        like = {n: jax.ShapeDtypeStruct(call.shape(n), call.type(n)) for n in call.wrt}
        tangents = call.directions("tangents", like, poison=heard)
    return placed(call, (arrays, cotangents, tangents))


# --- Meshes -----------------------------------------------------------------------------------------------------------

MESH = (2, 2)


def over_mesh(call: Call, function: Callable) -> Callable:
    """A function of the arrays of each device as one of whole arrays."""
    split, axes = call.module.OVER, sorted({*call.module.OVER.values()})
    sizes = tuple(call.sizes[axis] for axis in axes)
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices_of(call))
    of = lambda axes: PartitionSpec(*(split.get(axis) for axis in axes.split()))
    specs = {name: of(axes) for name, axes in call.operands.items()}
    results = [of(axes) for axes, _ in call.module.results(call)]
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=results))


def devices_of(call: Call) -> list[jax.Device]:
    """The devices of its mesh, if it has one: CPU devices if the default platform has too few."""
    if hasattr(call.module, "OVER"):
        count = math.prod(call.sizes[axis] for axis in {*call.module.OVER.values()})
    else:
        count = 0 if call.mesh is None else math.prod(MESH)
    found = jax.devices() if count <= len(jax.devices()) else jax.devices("cpu")
    return found[:count]


def on_devices(call: Call) -> contextlib.AbstractContextManager:
    """Arrays and programs belong to the devices of the mesh."""
    devices = devices_of(call)
    return jax.default_device(devices[0]) if devices else contextlib.nullcontext()


def mesh_of(call: Call) -> Any:
    kind = AxisType.Explicit if call.mesh[0] == "explicit" else AxisType.Auto
    return jax.make_mesh(MESH, ("x", "y"), axis_types=(kind, kind), devices=devices_of(call))


def placed(call: Call, args: tuple) -> tuple:
    """Arrays of JAX; on a mesh those of the operation are sharded along the letters of the call."""
    if call.mesh is None or call.mesh[0] == "shard_map":
        return jax.tree.map(jnp.asarray, args)
    mesh = mesh_of(call)
    put = lambda x, axes: jax.device_put(x, NamedSharding(mesh, spec(call, axes)))
    arrays, cotangents, tangents = args
    of_operands = lambda of: None if of is None else {name: put(x, call.operands[name]) for name, x in of.items()}
    if cotangents is not None:
        axes = [axes for axes, _ in call.module.results(call)]
        cotangents = [put(x, of) for x, of in zip(cotangents, axes, strict=True)]
    return of_operands(arrays), cotangents, of_operands(tangents)


def spec(call: Call, axes: str) -> PartitionSpec:
    split: Mapping[str, str] = call.mesh[1]
    return PartitionSpec(*(split.get(a) if call.sizes.get(a, 1) != 1 else None for a in axes.split()))


def _mesh_arguments(call: Call) -> dict[str, Any]:
    if call.mesh is None or call.mesh[0] != "shard_map":
        return {}
    renamed = OPERATIONS[call.operation].renamed
    names = [name for name in call.operands if name != "dropout_key"]
    out = [spec(call, axes) for axes, _ in call.module.results(call)]
    return dict(
        mesh=mesh_of(call),
        in_specs={renamed.get(name, name): spec(call, call.operands[name]) for name in names},
        out_specs=out[0] if len(out) == 1 else tuple(out),
    )


def stacked(results: np.ndarray) -> Any:
    """Results of examples, an object array outer map first, as the maps stack them."""
    if results.ndim == 0:
        return results.item()
    parts = [stacked(part) if isinstance(part, np.ndarray) else part for part in results]
    return jax.tree.map(lambda *x: np.stack(x), *parts)
