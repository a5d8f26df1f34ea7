"""A conditional in which devices of a mesh take different branches, for programs of one platform.

A program that is lowered for several platforms has a conditional on the platform around each kernel. XLA removes the
branches of other platforms, except inside another conditional, where the platform index is an operand: there it
compiles the kernels of all platforms, and fails when the program is loaded (seen on jax 0.11.2).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..errors import UnsupportedError


def device_switch(operation: str, index: Array, branches: Sequence[Callable], *operands: Any) -> Any:
    """`jax.lax.switch` of an index that differs between devices, refused in a program for several platforms."""
    return lax.switch(_of_one_platform.bind(index, operation=operation), branches, *operands)


_of_one_platform = Primitive("of_one_platform")
_of_one_platform.def_impl(lambda x, *, operation: x)
_of_one_platform.def_abstract_eval(lambda x, *, operation: x)
batching.defvectorized(_of_one_platform)


def _lower(ctx, x, *, operation):
    platforms = ctx.platforms or ctx.module_context.platforms
    if len(platforms) > 1:
        raise UnsupportedError(
            f"{operation}: its devices take different branches, and XLA would compile the kernels of all platforms "
            f"({', '.join(platforms)}) for each of them; export it for one platform at a time"
        )
    return [x]


mlir.register_lowering(_of_one_platform, _lower)
