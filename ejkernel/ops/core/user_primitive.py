"""A user's kernel as primitives of JAX, so that every transform applies to it.

The trio x, x_jvp and x_bwd stands for the functions `forward`, `tangent` and `cotangent` of one example. `jax.vmap`
keeps a primitive and adds a level to its parameters: what is lowered is then the vmap of the function. The derivatives
of x_jvp and x_bwd are those of their functions; x_bwd is the transpose of x_jvp, and x_jvp that of x_bwd.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from ejkernel.types import Target

from ..utils.labels import labelled
from ..utils.operands import is_array
from .kernel import Kernel
from .user_call import (
    Call,
    cotangent,
    cotangent_types,
    forward,
    implementation,
    is_inexact,
    replaced,
    split,
    tangent,
    tangent_types,
)

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def bind(kernel: Kernel, args: tuple, kwargs: dict[str, Any], config: Any, target: Target | None) -> Any:
    """Binds the primitive of `kernel(*args, **kwargs)` with a config chosen for `target` (None: given by the user)."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    static = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    call = Call(kernel, structure, static, target)
    try:
        hash((call, config))
    except TypeError as error:
        raise TypeError(
            f"{kernel.name}: the config, and arguments that are no arrays, have to be hashable: {error}"
        ) from error
    arrays = _equally_varying([leaf for leaf in leaves if is_array(leaf)])
    results = _primitives(kernel.name).forward.bind(*arrays, call=call, config=config, levels=())
    return jax.tree.unflatten(_structure_of_results(call, config, tuple(map(jax.typeof, arrays))), results)


def _equally_varying(arrays: list[Any]) -> list[Any]:
    """Under `shard_map`: casts each array to vary over the mesh axes that any of them varies over.

    The transpose of the cast sums the cotangent of an array that is the same on all devices over them.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(arrays, varying, strict=True)
    ]


@functools.lru_cache(maxsize=4096)
def _structure_of_results(call: Call, config: Any, avals: tuple) -> Any:
    return jax.tree.structure(jax.eval_shape(lambda *arrays: call.run(arrays, config, None), *avals))


# --- Many examples


class Level(NamedTuple):
    """A vmap around the function of a primitive, the innermost first.

    Attributes:
        in_axes: of each operand, None where it is not mapped.
        out_axes: of each result, None where it is the sum over the examples (the cotangent of what is not mapped); with
            None for all of them, each has the axis in front.
    """

    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...] | None = None


def _over(levels: tuple[Level, ...], function: Callable) -> Callable:
    for level in levels:
        function = functools.partial(_mapped, function, level)
    return function


def _mapped(function, level, *operands):
    results = jax.vmap(function, level.in_axes)(*operands)
    out_axes = level.out_axes or (0,) * len(results)
    return [x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(results, out_axes, strict=True)]


# --- The primitives


class Trio(NamedTuple):
    """The primitives of a kernel."""

    forward: Primitive
    tangent: Primitive
    cotangent: Primitive


@functools.cache
def _primitives(name: str) -> Trio:
    trio = Trio(
        _primitive(name, forward, forward),
        _primitive(f"{name}_jvp", tangent, tangent_types),
        _primitive(f"{name}_bwd", cotangent, cotangent_types),
    )
    ad.primitive_jvps[trio.forward] = functools.partial(_jvp, trio)
    ad.primitive_transposes[trio.tangent] = functools.partial(_transpose_tangent, trio)
    ad.primitive_transposes[trio.cotangent] = functools.partial(_transpose_cotangent, trio)
    ad.primitive_jvps[trio.tangent] = functools.partial(_jvp_of_function, tangent)
    ad.primitive_jvps[trio.cotangent] = functools.partial(_jvp_of_function, cotangent)
    return trio


def _primitive(name: str, function: Callable, types: Callable) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(functools.partial(_types_of_results, types))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    for platform in _PLATFORMS:
        lowered = functools.partial(_lowered, name, function, platform)
        mlir.register_lowering(primitive, mlir.lower_fun(lowered, multiple_results=True), platform=platform)
    return primitive


def _types_of_results(types, *avals, levels, **params):
    # Traced rather than computed from shapes, so that results have the shardings and manual axes that JAX gives them.
    return jax.make_jaxpr(_over(levels, functools.partial(types, **params)))(*avals).out_avals


def _batch(primitive, operands, axes, *, levels, **params):
    results = primitive.bind(*operands, levels=(*levels, Level(tuple(axes))), **params)
    return results, [0] * len(results)


def _lowered(name, function, platform, *operands, call, config, levels, **params):
    def of_one_example(*operands):
        chosen = call.config_on(platform, config, split(call, operands)[0])
        with labelled(name, implementation(call.kernel, platform)[0], chosen):
            return function(*operands, call=call, config=chosen, platform=platform, **params)

    return _over(levels, of_one_example)(*operands)


def _jvp(trio, arrays, tangents, *, call, config, levels):
    results = trio.forward.bind(*arrays, call=call, config=config, levels=levels)
    wrt = tuple(i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero)
    of_tangents = tuple(Level((*in_axes, *(in_axes[i] for i in wrt))) for in_axes, _ in levels)
    active = [tangents[i] for i in wrt]
    tangents = iter(trio.tangent.bind(*arrays, *active, call=call, config=config, wrt=wrt, levels=of_tangents))
    return results, [next(tangents) if is_inexact(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _transpose_tangent(trio, cotangents, *operands, call, config, wrt, levels):
    arrays, tangents = split(call, operands)
    n = len(arrays)
    unknown = [j for j, tangent in enumerate(tangents) if ad.is_undefined_primal(tangent)]
    present = tuple(type(cotangent) is not ad.Zero for cotangent in cotangents)
    given = [cotangent for cotangent, is_given in zip(cotangents, present, strict=True) if is_given]
    # A result of x_jvp has each mapped axis in front, and so has its cotangent; that of a tangent is mapped as it is.
    of_cotangents = tuple(
        Level((*in_axes[:n], *(0 for _ in given)), tuple(in_axes[n + j] for j in unknown)) for in_axes, _ in levels
    )
    gradients = trio.cotangent.bind(
        *arrays,
        *given,
        call=call,
        config=config,
        wrt=tuple(wrt[j] for j in unknown),
        present=present,
        levels=of_cotangents,
    )
    of_tangents = dict(zip(unknown, gradients, strict=True))
    return [None] * n + [of_tangents.get(j) for j in range(len(tangents))]


def _transpose_cotangent(trio, cotangents, *operands, call, config, wrt, present, levels):
    arrays, given = split(call, operands)
    if any(map(ad.is_undefined_primal, arrays)):
        raise NotImplementedError(f"{call.kernel.name}_bwd is linear in its cotangents alone")
    moving = [i for i, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero]
    if not moving:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    n = len(arrays)
    # What was summed over the examples has one cotangent for all of them, and a tangent that is the same for all.
    of_tangents = tuple(
        Level((*in_axes[:n], *(out_axes[i] if out_axes else 0 for i in moving))) for in_axes, out_axes in levels
    )
    tangents = trio.tangent.bind(
        *arrays,
        *(cotangents[i] for i in moving),
        call=call,
        config=config,
        wrt=tuple(wrt[i] for i in moving),
        levels=of_tangents,
    )
    of_given = (tangent for tangent, is_given in zip(tangents, present, strict=True) if is_given)
    return [None] * n + [
        _with_axes(tangent, [in_axes[n + j] for in_axes, _ in levels]) if ad.is_undefined_primal(x) else None
        for j, (x, tangent) in enumerate(zip(given, of_given, strict=True))
    ]


def _with_axes(result, axes):
    """A result, which has the mapped axes in front, with each where it is in an operand; None: summed over it."""
    if not axes:
        return result
    *inner, axis = axes
    of_one = functools.partial(_with_axes, axes=inner)
    return jax.vmap(of_one)(result).sum(0) if axis is None else jax.vmap(of_one, out_axes=axis)(result)


def _jvp_of_function(function, operands, tangents, *, levels, **params):
    active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    whole = _over(levels, functools.partial(function, **params))
    of_active = lambda *values: whole(*replaced(operands, active, values))
    return jax.jvp(of_active, tuple(operands[i] for i in active), tuple(tangents[i] for i in active))
