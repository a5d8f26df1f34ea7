"""A user's kernel as primitives of JAX, so that every transform applies to it.

The primitives x, x_jvp and x_bwd are the functions `forward`, `tangent` and `cotangent` of a call.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.primitives._factory import COTANGENT, TANGENT
from ejkernel.primitives._traced import TracedPrimitive
from ejkernel.primitives._trio import WiredTrio
from ejkernel.types import ShortRepr, Target

from ..utils.labels import labelled
from ..utils.operands import is_array
from .types import hashable
from .user_call import Call, cotangent, cotangent_types, forward, tangent, tangent_types


def bind(kernel: Any, args: tuple, kwargs: dict[str, Any], config: Any, target: Target | None) -> Any:
    """Binds the primitive of `kernel(*args, **kwargs)` with a config chosen for `target` (None: given by the user)."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    static = tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
    call, config = Call(kernel, structure, static, target), hashable(kernel.name, config)
    try:
        hash(call)
    except TypeError as error:
        raise TypeError(f"{kernel.name}: arguments that are no arrays have to be hashable: {error}") from error
    arrays = _equally_varying([leaf for leaf in leaves if is_array(leaf)])
    returned = _structure_of_results(call, config, tuple(map(jax.typeof, arrays)))
    results = _trio(kernel.name).forward.bind(
        dict(zip(call.operands, arrays, strict=True)),
        spec=call,
        config=config,
        chooser=ConfigOfForward(config),
        results=[f"y{i}" for i in range(returned.num_leaves)],
    )
    return jax.tree.unflatten(returned, results.values())


@dataclass(frozen=True, repr=False)
class ConfigOfForward(ShortRepr):
    """The `Chooser` of a user's kernel, whose derivatives have the config of the call."""

    of_forward: Any
    platform: str = "auto"

    def config(self, *_: Any) -> Any:
        """The config of the forward."""
        return self.of_forward


@functools.cache
def _trio(name: str) -> WiredTrio:
    return WiredTrio(
        name,
        _primitive(name, forward, forward),
        _primitive(f"{name}_jvp", tangent, tangent_types, linear=TANGENT),
        _primitive(f"{name}_bwd", cotangent, cotangent_types, linear=COTANGENT),
    )


def _primitive(name: str, function: Callable, types: Callable, linear: str | None = None) -> TracedPrimitive:
    """The primitive of a function, lowered with a label and with the config for the platform of JAX."""

    def labelled_function(arrays, results, spec, config, jax_platform):
        if jax_platform is None:
            return function(arrays, results, spec, config)
        chosen = spec.config_on(jax_platform, config, arrays)
        with labelled(name, spec.implementation_on(jax_platform), chosen):
            return function(arrays, results, spec, chosen, jax_platform)

    return TracedPrimitive(name, labelled_function, types, linear)


@functools.lru_cache(maxsize=4096)
def _structure_of_results(call: Call, config: Any, avals: tuple) -> Any:
    of_arrays = lambda *arrays: call.run(dict(zip(call.operands, arrays, strict=True)), config, None)
    return jax.tree.structure(jax.eval_shape(of_arrays, *avals))


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
