"""Primitives that stand for a function, whose trace determines all of their rules.

`jax.vmap` keeps such a primitive and adds a level to its spec: it is then lowered to the vmap of the function.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp
from jax.interpreters import ad, mlir

from ..errors import type_error
from ._factory import COTANGENT, TANGENT, NamedPrimitive


class Level(NamedTuple):
    """A vmap.

    Attributes:
        axes: the mapped axis by operand and result; for None an operand is unmapped, and a result summed over the axis.
        axis_name: the name of the axis, over which the function may have collectives; None without.
        size: the size of the axis.
    """

    axes: tuple[tuple[str, int | None], ...]
    axis_name: Hashable | None
    size: int


@runtime_checkable
class TracedSpec(Protocol):
    """What is computed: a hashable value.

    Attributes:
        levels: the vmaps around the function, the innermost first.
    """

    levels: tuple[Level, ...]

    def mapped(self, level: Level) -> Self:
        """The spec under one more vmap."""


class TracedPrimitive(NamedPrimitive):
    """A primitive that stands for a function of one example.

    Attributes:
        function: (operands by name, requested results, spec, config, jax_platform) → those results. The platform is
            that of a lowering, or None for shapes and derivatives.
        types: like `function` without a platform, for a cheaper trace with results of the same types.
    """

    def __init__(self, name: str, function: Callable, types: Callable, linear: str | None = None) -> None:
        self.function, self.types = function, types
        super().__init__(name, linear=linear)
        if linear is not None:
            ad.primitive_jvps[self.primitive] = self._jvp
        for jax_platform in ("cpu", "cuda", "rocm", "tpu"):
            mlir.register_lowering(self.primitive, partial(self._lower, jax_platform), platform=jax_platform)

    def over_levels(
        self, function: Callable[[Mapping[str, Any]], Sequence[Any]], operands: Sequence[str], results, levels
    ) -> Callable[..., Sequence[Any]]:
        """A function of arrays by name as a function of positional arrays, under the vmaps of the levels."""
        mapped = lambda *arrays: function(dict(zip(operands, arrays, strict=True)))
        for level in levels:
            axes = partial(_axis, dict(level.axes))
            mapped = partial(_mapped, mapped, tuple(map(axes, operands)), tuple(map(axes, results)), level)
        return mapped

    def _abstract_eval(self, *avals, operands, results, spec, config, chooser):
        # Traced rather than computed from shapes: results have the shardings and manual axes that JAX gives them.
        types = partial(self.types, results=results, spec=spec, config=config)
        traced = jax.make_jaxpr(self.over_levels(types, operands, results, spec.levels))(*avals)
        if captured := [x for x in traced.consts if isinstance(x, jax.core.Tracer)]:
            given = {f"array {i}": x for i, x in enumerate(captured)}
            raise type_error(
                self.name, "run reads arrays that are traced outside of it; pass them as operands of the call", **given
            )
        return traced.out_avals

    def _batch(self, axis, args, dims, *, operands, results, spec, config, chooser):
        # An axis without a name has a bare object for one.
        axis_name = None if type(axis.name) is object else axis.name
        axes = (*zip(operands, dims, strict=True), *((name, 0) for name in results))
        level = Level(axes, axis_name, axis.size)
        arrays = dict(zip(operands, args, strict=True))
        if axis_name is None and all(dim is None for dim in dims):
            return self._unmapped(arrays, spec=spec, config=config, chooser=chooser, results=results)
        out = self.bind(arrays, spec=spec.mapped(level), config=config, chooser=chooser, results=results)
        return list(out.values()), [0] * len(out)

    def _lower(self, jax_platform, ctx, *args, operands, results, spec, config, chooser):
        function = partial(self.function, results=results, spec=spec, config=config, jax_platform=jax_platform)
        return mlir.lower_fun(self.over_levels(function, operands, results, spec.levels), multiple_results=True)(
            ctx, *args
        )

    def _jvp(self, primals, tangents, *, operands, results, spec, config, chooser):
        function = partial(self.function, results=results, spec=spec, config=config, jax_platform=None)
        whole = self.over_levels(function, operands, results, spec.levels)
        active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_active(*values):
            new = dict(zip(active, values, strict=True))
            return whole(*(new.get(i, x) for i, x in enumerate(primals)))

        return jax.jvp(of_active, *(tuple(of[i] for i in active) for of in (primals, tangents)))


def _axis(level: Mapping[str, int | None], name: str) -> int | None:
    """The mapped axis of an array; a tangent or cotangent that the level does not name has that of its dual or primal.

    So the levels of a primitive also apply to those that JAX derives from it. The cotangent of an unmapped array is the
    sum over all examples.
    """
    primal = name.removesuffix(TANGENT).removesuffix(COTANGENT)
    return level[next(known for known in (name, primal + TANGENT, primal + COTANGENT, primal) if known in level)]


def _mapped(function: Callable, in_axes: tuple, out_axes: tuple, level: Level, *arrays: Any) -> list[Any]:
    results = jax.vmap(function, in_axes, axis_name=level.axis_name, axis_size=level.size)(*arrays)
    return [x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(results, out_axes, strict=True)]
