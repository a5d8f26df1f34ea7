"""A call of a user's kernel, and the three functions of its arrays that are its primitives.

    forward     arrays → results                                  the kernel's method for the platform of JAX
    tangent     arrays, tangents → tangents of the results        linear in the tangents: the jvp of that method
    cotangent   arrays, cotangents → cotangents of the arrays     the transpose of tangent: `custom_vjp`, else the vjp

Arrays are named x0, x1, … and results y0, y1, …, in the order of the leaves of the call's arguments and results. The
types of the derivatives' results are computed by separate functions, so that a derivative that a kernel cannot have
(the jvp of a kernel with its own `custom_vjp`) is traced only when it is requested.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import type_error
from ejkernel.primitives._factory import COTANGENT, TANGENT
from ejkernel.primitives._traced import Level
from ejkernel.types import Target

from ..utils.operands import is_array

Arrays = Mapping[str, Any]
_WRITTEN_FOR = {"cuda": ("triton", "cuda", "cute"), "rocm": ("triton",), "tpu": ("pallas",)}


@dataclass(frozen=True)
class Call:
    """A call without its arrays and config: the spec of its primitives.

    Attributes:
        kernel: the `Kernel` that is called.
        structure: the tree structure of `(args, kwargs)`.
        static: for each leaf None if it is an array, else `(type, value)`, so that 1 and 1.0 are different calls.
        target: what the config was chosen for; None if a user gave it, which is used on every platform.
        levels: the levels of vmap around the call.
    """

    kernel: Any
    structure: Any
    static: tuple
    target: Target | None
    levels: tuple[Level, ...] = ()

    def mapped(self, level: Level) -> "Call":
        """The spec under one more vmap."""
        return replace(self, levels=(*self.levels, level))

    @property
    def operands(self) -> list[str]:
        """The names of the arrays."""
        return [f"x{i}" for i in range(sum(leaf is None for leaf in self.static))]

    def arguments(self, arrays: Arrays) -> tuple[tuple, dict[str, Any]]:
        """`(args, kwargs)` with the given arrays as their array leaves."""
        given = map(arrays.get, self.operands)
        return jax.tree.unflatten(self.structure, [next(given) if leaf is None else leaf[1] for leaf in self.static])

    def run(self, arrays: Arrays, config: Any, jax_platform: str | None) -> Any:
        """The result of the kernel's method for a platform of JAX."""
        args, kwargs = self.arguments(arrays)
        return implementation(self.kernel, jax_platform)[1](*args, cfg=config, **kwargs)

    def config_on(self, jax_platform: str, config: Any, arrays: Arrays) -> Any:
        """The config, or the heuristic one for this platform of JAX if it was chosen for another one."""
        if self.target is None or self.target.platform == jax_platform:
            return config
        return self.kernel.heuristic_on(jax_platform, *self.arguments(arrays))

    def implementation_on(self, jax_platform: str) -> str:
        """The name of the kernel's method for a platform of JAX."""
        return implementation(self.kernel, jax_platform)[0]

    def __repr__(self) -> str:
        options = [repr(leaf[1]) for leaf in self.static if leaf is not None]
        return f"{self.kernel!r}({', '.join(options)})"


def implementation(kernel: Any, jax_platform: str | None) -> tuple[str, Callable]:
    """(name, method) of a kernel for a platform of JAX; for None, the method that defines shapes and derivatives."""
    for name in (*_WRITTEN_FOR.get(jax_platform, ()), "xla"):
        if (method := getattr(kernel, f"run_{name}")) is not None:
            return name, method
    return "run", kernel.run


def refuse_platform(kernel: Any) -> None:
    """Raises, for a call with `platform=`, unless the kernel's method has an option of this name."""
    name, method = implementation(kernel, None)
    options = inspect.signature(method).parameters
    if "platform" not in options and not any(option.kind is option.VAR_KEYWORD for option in options.values()):
        of = "; ".join(f"{', '.join(f'run_{x}' for x in written)} on {on}" for on, written in _WRITTEN_FOR.items())
        raise type_error(
            kernel.name,
            f"platform is given, which {name} does not take; what the program is lowered for decides on the method "
            f"that runs: the first there is of {of}, else run_xla, else run",
        )


# --- The functions


def forward(
    arrays: Arrays, results: Sequence[str], spec: Call, config: Any, jax_platform: str | None = None
) -> list[Any]:
    """The results of `run` with the names in `results`."""
    leaves = dict(_results(arrays, spec, config, jax_platform))
    return [leaves[name] for name in results]


def tangent(
    arrays: Arrays, results: Sequence[str], spec: Call, config: Any, jax_platform: str | None = None
) -> list[Any]:
    """The tangents of the results named in `results`."""
    moving = [name for name in spec.operands if name + TANGENT in arrays]
    moved = [name.removesuffix(TANGENT) for name in results]
    of_moving = lambda *values: forward(
        {**arrays, **dict(zip(moving, values, strict=True))}, moved, spec, config, jax_platform
    )
    return jax.jvp(of_moving, *(tuple(arrays[n + suffix] for n in moving) for suffix in ("", TANGENT)))[1]


def tangent_types(arrays: Arrays, results: Sequence[str], spec: Call, config: Any) -> list[Any]:
    """The types of the tangents, which are those of the results."""
    return forward(arrays, [name.removesuffix(TANGENT) for name in results], spec, config)


def cotangent(
    arrays: Arrays, results: Sequence[str], spec: Call, config: Any, jax_platform: str | None = None
) -> list[Any]:
    """The cotangents of the operands named in `results`."""
    wrt = [name.removesuffix(COTANGENT) for name in results]

    def outputs(*values):
        of_all = _results({**arrays, **dict(zip(wrt, values, strict=True))}, spec, config, jax_platform)
        return {name: y for name, y in of_all if jnp.issubdtype(y.dtype, jnp.inexact)}

    active = [arrays[name] for name in wrt]
    given = {
        name: arrays.get(name + COTANGENT, jnp.zeros(y.shape, y.dtype))
        for name, y in jax.eval_shape(outputs, *active).items()
    }
    if spec.kernel.custom_vjp is not None:
        return _custom_cotangent(arrays, given, wrt, spec, config)
    return list(jax.vjp(outputs, *active)[1](given))


def cotangent_types(arrays: Arrays, results: Sequence[str], spec: Call, config: Any) -> list[Any]:
    """The types of the cotangents, which are those of the operands."""
    return [arrays[name.removesuffix(COTANGENT)] for name in results]


def _results(arrays: Arrays, spec: Call, config: Any, jax_platform: str | None) -> list[tuple[str, Any]]:
    return [(f"y{i}", leaf) for i, leaf in enumerate(jax.tree.leaves(spec.run(arrays, config, jax_platform)))]


# --- custom_vjp


def _custom_cotangent(arrays: Arrays, given: Arrays, wrt: Sequence[str], spec: Call, config: Any) -> list[Any]:
    name, (args, kwargs) = spec.kernel.name, spec.arguments(arrays)
    positional = spec.operands[: sum(map(is_array, jax.tree.leaves(args)))]
    if not set(wrt) <= set(positional):
        raise TypeError(f"{name}: custom_vjp gives arrays that are passed by name no gradient; pass them by position")
    of_all = tuple(given.get(y) for y, _ in _results(arrays, spec, config, None))
    gradients = spec.kernel.custom_vjp(args, config, kwargs, of_all)
    if not isinstance(gradients, tuple | list) or len(gradients) != len(args):
        raise TypeError(f"{name}: custom_vjp has to return {len(args)} gradients, one for each positional operand")
    of_arrays = []
    for arg, gradient in zip(args, gradients, strict=True):
        leaves, structure = jax.tree.flatten(arg)
        of_leaves = [None] * len(leaves) if gradient is None else structure.flatten_up_to(gradient)
        of_arrays += [x for x, leaf in zip(of_leaves, leaves, strict=True) if is_array(leaf)]
    found = dict(zip(positional, of_arrays, strict=True))
    return [_checked_gradient(name, x, arrays[x], found[x]) for x in wrt]


def _checked_gradient(name: str, of: str, array: Any, gradient: Any) -> Any:
    if gradient is None:
        return jnp.zeros_like(array)
    if jnp.shape(gradient) != array.shape:
        raise ValueError(
            f"{name}: custom_vjp gave a gradient of shape {jnp.shape(gradient)} to array {of[1:]} of {array.shape}"
        )
    return jnp.asarray(gradient, array.dtype)
