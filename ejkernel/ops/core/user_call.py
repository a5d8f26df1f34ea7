"""A call of a user's kernel, and the three functions of its arrays that its primitives stand for.

    forward     arrays → results                                  the kernel's method for the platform
    tangent     arrays, tangents → tangents of the results        linear in the tangents: the jvp of that method
    cotangent   arrays, cotangents → cotangents of the arrays     the transpose of tangent: `custom_vjp`, else the vjp

Beside the derivatives stands what gives the types of their results, so that one that a kernel cannot have (the jvp of a
kernel with its own `custom_vjp`) is traced only where it is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import Target

from ..utils.operands import abstract, is_array
from .kernel import Invocation, Kernel

_WRITTEN_FOR = {"cuda": ("triton", "cuda", "cute"), "rocm": ("triton",), "tpu": ("pallas",)}


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
        return implementation(self.kernel, platform)[1](*args, cfg=config, **kwargs)

    def config_on(self, platform: str, config: Any, arrays: Sequence[Any]) -> Any:
        """The config; if it was chosen for another platform than this, what heuristics choose for this one."""
        if self.target is None or self.target.platform == platform:
            return config
        args, kwargs = abstract(self.arguments(arrays))
        return self.kernel.heuristic_cfg(Invocation(self.kernel, args, kwargs, target=Target(platform)))

    @property
    def number_of_arrays(self) -> int:
        """How many of the operands are arrays."""
        return sum(leaf is None for leaf in self.static)

    def __repr__(self) -> str:
        options = [repr(leaf[1]) for leaf in self.static if leaf is not None]
        return f"{self.kernel!r}({', '.join(options)})"


def implementation(kernel: Kernel, platform: str | None) -> tuple[str, Callable]:
    """(its name, the method) of what runs on a platform; with None, of what gives the shapes and the derivatives."""
    for name in (*_WRITTEN_FOR.get(platform, ()), "xla"):
        if (method := getattr(kernel, f"run_{name}")) is not None:
            return name, method
    return "run", kernel.run


def forward(*arrays, call, config, platform=None):
    return jax.tree.leaves(call.run(arrays, config, platform))


def tangent(*operands, call, config, wrt, platform=None):
    arrays, tangents = split(call, operands)
    differentiable = lambda *active: _inexact(
        forward(*replaced(arrays, wrt, active), call=call, config=config, platform=platform)
    )
    return jax.jvp(differentiable, tuple(arrays[i] for i in wrt), tuple(tangents))[1]


def tangent_types(*operands, call, config, wrt):
    return _inexact(forward(*split(call, operands)[0], call=call, config=config))


def cotangent(*operands, call, config, wrt, present, platform=None):
    arrays, given = split(call, operands)
    results = lambda *active: forward(*replaced(arrays, wrt, active), call=call, config=config, platform=platform)
    active, given, mask = [arrays[i] for i in wrt], iter(given), iter(present)
    cotangents = [
        None if not is_inexact(x) else next(given) if next(mask) else jnp.zeros(x.shape, x.dtype)
        for x in jax.eval_shape(results, *active)
    ]
    if call.kernel.custom_vjp is not None:
        return _custom_cotangent(call, config, arrays, cotangents, wrt)
    _, transpose = jax.vjp(lambda *active: _inexact(results(*active)), *active)
    return list(transpose([x for x in cotangents if x is not None]))


def cotangent_types(*operands, call, config, wrt, present):
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


def split(call, operands):
    """`(arrays, rest)` of the operands of a derivative."""
    return operands[: call.number_of_arrays], operands[call.number_of_arrays :]


def replaced(arrays, where, values):
    """`arrays` with `values` in the places `where`."""
    new = dict(zip(where, values, strict=True))
    return [new.get(i, x) for i, x in enumerate(arrays)]


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _inexact(results):
    return [x for x in results if is_inexact(x)]
