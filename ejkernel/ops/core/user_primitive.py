"""A user's kernel as primitives of JAX, so that every transform applies to it.

    x       arrays → results                                  the kernel's method for the platform
    x_jvp   arrays, tangents → tangents of the results        linear in the tangents: the jvp of that method
    x_bwd   arrays, cotangents → cotangents of the arrays     the transpose of x_jvp: `custom_vjp`, else the vjp

Each lowers to a function of one example, below. `jax.vmap` keeps the primitive and adds a level to its parameters: what
is lowered is then the vmap of the function. The derivatives of x_jvp and x_bwd are those of their functions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from ejkernel.types import Target

from ..utils.labels import labelled
from ..utils.operands import abstract, is_array
from .kernel import Invocation, Kernel

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_WRITTEN_FOR = {"cuda": "triton", "rocm": "triton", "tpu": "pallas"}


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


@dataclass(frozen=True)
class Call:
    """Everything of a call but its arrays and its config.

    Attributes:
        kernel: the kernel that is called.
        structure: of `(args, kwargs)`.
        static: for each leaf None if it is an array, else `(type, value)`; 1 and 1.0 are different calls.
        target: what the config was chosen for; None if a user gave it, which then stands on every platform.
    """

    kernel: Kernel
    structure: Any
    static: tuple
    target: Target | None

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """`(args, kwargs)` with these arrays."""
        given = iter(arrays)
        return jax.tree.unflatten(self.structure, [next(given) if leaf is None else leaf[1] for leaf in self.static])

    def run(self, arrays: Sequence[Any], config: Any, platform: str | None) -> Any:
        """What the kernel's method for the platform returns."""
        args, kwargs = self.arguments(arrays)
        return _implementation(self.kernel, platform)[1](*args, cfg=config, **kwargs)

    @property
    def number_of_arrays(self) -> int:
        return sum(leaf is None for leaf in self.static)

    def __repr__(self) -> str:
        options = [repr(leaf[1]) for leaf in self.static if leaf is not None]
        return f"{self.kernel!r}({', '.join(options)})"


def _implementation(kernel: Kernel, platform: str | None) -> tuple[str, Callable]:
    """(its name, the method) of what runs on a platform; with None, of what gives the shapes and the derivatives."""
    for name in (_WRITTEN_FOR.get(platform, "xla"), "xla"):
        if (method := getattr(kernel, f"run_{name}")) is not None:
            return name, method
    return "run", kernel.run


def _equally_varying(arrays: list[Any]) -> list[Any]:
    """Under `shard_map`: casts each array to vary over the mesh axes that any of them varies over.

    So the cotangent of an array that is the same on all devices is summed over them, which is the transpose of the
    cast.
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


# --- The functions of one example, and the types of what they return


def _forward(*arrays, call, config, platform=None):
    return jax.tree.leaves(call.run(arrays, config, platform))


def _tangent(*operands, call, config, wrt, platform=None):
    arrays, tangents = _split(call, operands)
    differentiable = lambda *active: _inexact(
        _forward(*_with(arrays, wrt, active), call=call, config=config, platform=platform)
    )
    return jax.jvp(differentiable, tuple(arrays[i] for i in wrt), tuple(tangents))[1]


def _tangent_types(*operands, call, config, wrt):
    return _inexact(_forward(*_split(call, operands)[0], call=call, config=config))


def _cotangent(*operands, call, config, wrt, present, platform=None):
    arrays, given = _split(call, operands)
    results = lambda *active: _forward(*_with(arrays, wrt, active), call=call, config=config, platform=platform)
    active, given, mask = [arrays[i] for i in wrt], iter(given), iter(present)
    cotangents = [
        None if not _is_inexact(x) else next(given) if next(mask) else jnp.zeros(x.shape, x.dtype)
        for x in jax.eval_shape(results, *active)
    ]
    if call.kernel.custom_vjp is not None:
        return _custom_cotangent(call, config, arrays, cotangents, wrt)
    _, transpose = jax.vjp(lambda *active: _inexact(results(*active)), *active)
    return list(transpose([x for x in cotangents if x is not None]))


def _cotangent_types(*operands, call, config, wrt, present):
    return [operands[i] for i in wrt]


def _custom_cotangent(call, config, arrays, cotangents, wrt):
    name, (args, kwargs) = call.kernel.name, call.arguments(arrays)
    if max(wrt) >= sum(map(is_array, jax.tree.leaves(args))):
        raise TypeError(f"{name}: custom_vjp gives arrays that are passed by name no gradient; pass them by position")
    gradients = call.kernel.custom_vjp(args, config, kwargs, tuple(cotangents))
    if not isinstance(gradients, tuple | list) or len(gradients) != len(args):
        raise TypeError(f"{name}: custom_vjp has to return {len(args)} gradients, one for each positional operand")
    of_arrays = []
    for arg, gradient in zip(args, gradients, strict=True):
        leaves, structure = jax.tree.flatten(arg)
        of_leaves = [None] * len(leaves) if gradient is None else structure.flatten_up_to(gradient)
        of_arrays += [x for x, leaf in zip(of_leaves, leaves, strict=True) if is_array(leaf)]
    return [_checked_gradient(name, i, arrays[i], of_arrays[i]) for i in wrt]


def _checked_gradient(name, i, array, gradient):
    if gradient is None:
        return jnp.zeros_like(array)
    if jnp.shape(gradient) != array.shape:
        raise ValueError(
            f"{name}: custom_vjp gave a gradient of shape {jnp.shape(gradient)} to array {i} of {array.shape}"
        )
    return jnp.asarray(gradient, array.dtype)


def _split(call, operands):
    return operands[: call.number_of_arrays], operands[call.number_of_arrays :]


def _with(arrays, where, values):
    """`arrays` with `values` in the places `where`."""
    replaced = dict(zip(where, values, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(arrays)]


def _is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _inexact(results):
    return [x for x in results if _is_inexact(x)]


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
        _primitive(name, _forward, _forward),
        _primitive(f"{name}_jvp", _tangent, _tangent_types),
        _primitive(f"{name}_bwd", _cotangent, _cotangent_types),
    )
    ad.primitive_jvps[trio.forward] = functools.partial(_jvp, trio)
    ad.primitive_transposes[trio.tangent] = functools.partial(_transpose, trio)
    ad.primitive_jvps[trio.tangent] = functools.partial(_jvp_of_function, _tangent)
    ad.primitive_jvps[trio.cotangent] = functools.partial(_jvp_of_function, _cotangent)
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
    # Traced rather than computed from shapes, so that results have the shardings and the manual axes that JAX gives
    # them.
    return jax.make_jaxpr(_over(levels, functools.partial(types, **params)))(*avals).out_avals


def _batch(primitive, operands, axes, *, levels, **params):
    results = primitive.bind(*operands, levels=(*levels, Level(tuple(axes))), **params)
    return results, [0] * len(results)


def _lowered(name, function, platform, *operands, call, config, levels, **params):
    def of_one_example(*operands):
        chosen = _config_on(platform, call, config, _split(call, operands)[0])
        with labelled(name, _implementation(call.kernel, platform)[0], chosen):
            return function(*operands, call=call, config=chosen, platform=platform, **params)

    return _over(levels, of_one_example)(*operands)


def _config_on(platform, call, config, arrays):
    """The config; if it was chosen for another platform than the program is lowered for, what heuristics choose."""
    if call.target is None or call.target.platform == platform:
        return config
    args, kwargs = abstract(call.arguments(arrays))
    return call.kernel.heuristic_cfg(Invocation(call.kernel, args, kwargs, target=Target(platform)))


def _jvp(trio, arrays, tangents, *, call, config, levels):
    results = trio.forward.bind(*arrays, call=call, config=config, levels=levels)
    wrt = tuple(i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero)
    of_tangents = tuple(Level((*in_axes, *(in_axes[i] for i in wrt))) for in_axes, _ in levels)
    active = [tangents[i] for i in wrt]
    tangents = iter(trio.tangent.bind(*arrays, *active, call=call, config=config, wrt=wrt, levels=of_tangents))
    return results, [next(tangents) if _is_inexact(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _transpose(trio, cotangents, *operands, call, config, wrt, levels):
    arrays, tangents = _split(call, operands)
    n = len(arrays)
    unknown = [j for j, tangent in enumerate(tangents) if ad.is_undefined_primal(tangent)]
    present = tuple(type(cotangent) is not ad.Zero for cotangent in cotangents)
    given = [cotangent for cotangent, is_given in zip(cotangents, present, strict=True) if is_given]
    # A result of x_jvp has each mapped axis in front, so its cotangent has too; a tangent's cotangent is as the tangent
    # is.
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


def _jvp_of_function(function, operands, tangents, *, levels, **params):
    active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    whole = _over(levels, functools.partial(function, **params))
    of_active = lambda *values: whole(*_with(operands, active, values))
    return jax.jvp(of_active, tuple(operands[i] for i in active), tuple(tangents[i] for i in active))
