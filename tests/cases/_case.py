"""One call of an operation by axes and sizes, from which arrays of any dtype, shardings and smaller sizes are made."""

import functools
import importlib.util
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import ejkernel
from ejkernel.kernels._registry import kernel_registry
from ejkernel.modules._composed import COMPOSED
from ejkernel.modules._operation import OPERATIONS

from ._over import Over

Values = Callable[[np.random.Generator, tuple[int, ...]], Any]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers."""
    return rng.standard_normal(shape)


@dataclass(frozen=True)
class Operand:
    """An array by its axes, letters or numbers as in "1 h s t", and a function for its values, floats in float64.

    `sums` is the number of partial sums of its gradient if devices share the array.
    """

    axes: str
    values: Values = normal
    sums: int = 1

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in self.axes.split())


@dataclass(frozen=True, eq=False)
class Case:
    """A call of `ejkernel.lax.<operation>`.

    Attributes:
        operation: the name of the operation.
        name: what the case is about.
        sizes: the size of every letter.
        operands: operands by argument name; a string stands for an operand of normal values.
        results: the axes of each result.
        options: the static arguments.
        local: whether a part of the arrays alone gives that part of the results; dropout also depends on the place.
        tiny: sizes for tests with quadratic cost; None if the case cannot be so small.
        split_with: a letter that is split together with another one, as keys and values in turn with their heads.
        composed_formula: for a composed operation, its formula with the same arguments.
        composed_split: the letters along which it can be split. For other operations the primitives have both.
        over: the mesh axes over which the operation is called. The formula then also gets `axis_sizes`.
    """

    operation: str
    name: str
    sizes: Mapping[str, int]
    operands: Mapping[str, Operand | str]
    results: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    local: bool = True
    tiny: Mapping[str, int] | None = None
    split_with: Mapping[str, str] = field(default_factory=dict)
    composed_formula: Callable[..., Any] | None = None
    composed_split: tuple[str, ...] = ()
    over: Over | None = None

    def __post_init__(self):
        as_operand = lambda x: Operand(x) if isinstance(x, str) else x
        object.__setattr__(self, "operands", {name: as_operand(x) for name, x in self.operands.items()})

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"

    @property
    def is_composed(self) -> bool:
        return self.operation in COMPOSED

    @property
    def algorithm(self) -> Any:
        """The primitives of the operation, if it has some."""
        return OPERATIONS[self.operation].algorithm

    @property
    def reference(self) -> Callable[..., Any]:
        """The formula in JAX beside the implementation in XLA, or that implementation itself if there is none."""
        name = f"ejkernel.kernels._xla.{self.operation}"
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name).reference
        return kernel_registry.find(self.operation, "xla").implementation

    @property
    def program(self) -> tuple[Any, ...]:
        """A key of the compiled program: equal for calls that differ only in values."""
        operands = tuple((name, x.axes) for name, x in self.operands.items())
        sizes, mesh = tuple(sorted(self.sizes.items())), self.over and self.over.program
        return self.operation, sizes, operands, repr(self.options), self.differentiable, mesh

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        """The operands of the call that have tangents, which quantised ones do not."""
        names = self.operands if self.is_composed else self.algorithm.differentiable
        return tuple(name for name in names if name in self.operands and self._is_float(name))

    @property
    def split(self) -> tuple[str, ...]:
        """The letters of axes along which devices can split the call."""
        return self.composed_split if self.is_composed else self.algorithm.forward.layout.split

    def _is_float(self, name: str) -> bool:
        x = self.operands[name]
        return np.issubdtype(_type_of(x.values, x.shape(self.sizes)), np.floating)

    def types(self, dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
        """The types of the arrays, cached for all calls with such operands."""
        found = {}
        for name, x in self.operands.items():
            shape = x.shape(self.sizes)
            made = _type_of(x.values, shape)
            found[name] = jax.ShapeDtypeStruct(shape, dtype if made == np.float64 else made)
        return found

    def arrays(self, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """The arrays of the call. Values depend on the seed and the operand, not on the rest of the case."""
        return {name: self._made(name, x.values, x.shape(self.sizes), seed, dtype) for name, x in self.operands.items()}

    def cotangents(self, arrays: Mapping[str, Any], seed: int = 0) -> list[jax.Array]:
        """Normal values for every result of the call on these arrays."""
        types = enumerate(jax.eval_shape(self.call, arrays))
        return [self._made(f"result {i}", normal, x.shape, seed, x.dtype) for i, x in types]

    def tangents(self, seed: int = 1, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """Normal values for every differentiable array."""
        shapes = {name: self.operands[name].shape(self.sizes) for name in self.differentiable}
        return {name: self._made(name, normal, shape, seed, dtype) for name, shape in shapes.items()}

    def call(self, arrays: Mapping[str, Any], **options: Any) -> list[Any]:
        """The results of the operation."""
        operation = getattr(ejkernel.lax, self.operation)
        call = lambda arrays: jax.tree.leaves(operation(**arrays, **self.options, **options))
        return self.over.run(call, self.specs({}), self.result_specs({}))(dict(arrays)) if self.over else call(arrays)

    def formula(self, arrays: Mapping[str, Any]) -> list[Any]:
        """The results of the reference, which every implementation must give."""
        if self.is_composed:
            of_mesh = dict(axis_sizes=self.over.axis_sizes) if self.over else {}
            return jax.tree.leaves(self.composed_formula(**arrays, **self.options, **of_mesh))
        call = OPERATIONS[self.operation].prepare_arguments(**arrays, **self.options)
        outputs = self.reference(*self.algorithm.operands(**call.named), spec=call.spec)
        return jax.tree.leaves(call.finish(outputs._asdict()))

    def resized(self, sizes: Mapping[str, int]) -> "Case":
        return replace(self, sizes={**self.sizes, **sizes})

    def on(self, mesh: Mesh) -> "Case":
        """The case on the mesh of a test, if its operation is called over one."""
        return replace(self, over=replace(self.over, mesh=mesh)) if self.over else self

    def placed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays on the devices of the mesh over which the operation is called, unchanged if there is none."""
        return self.over.placed(arrays, self.specs({})) if self.over else dict(arrays)

    def spec(self, axes: str, split: Mapping[str, str]) -> PartitionSpec:
        """The spec of these axes, if letters are split over these mesh axes; an axis of size 1 cannot be split.

        Axes over which the operation is called are always split.
        """
        split = {**split, **self.over.split} if self.over else split
        with_split = lambda axis: self.split_with.get(axis, axis)
        over = lambda axis: split.get(with_split(axis)) if self.sizes.get(with_split(axis)) != 1 else None
        letters = axes.split()
        # A mesh axis can split only one axis of an array: of [d, d] the first.
        return PartitionSpec(*(over(x) if x not in letters[:i] else None for i, x in enumerate(letters)))

    def specs(self, split: Mapping[str, str]) -> dict[str, PartitionSpec]:
        """The specs of the arrays if the letters are split."""
        return {name: self.spec(x.axes, split) for name, x in self.operands.items()}

    def result_specs(self, split: Mapping[str, str]) -> list[PartitionSpec]:
        """The specs of the results then."""
        return [self.spec(axes, split) for axes in self.results]

    def _made(self, name: str, values: Values, shape: tuple[int, ...], seed: int, dtype: Any) -> jax.Array:
        x = values(np.random.default_rng([seed, zlib.crc32(name.encode())]), shape)
        return jnp.asarray(x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x)


@functools.cache
def _type_of(values: Values, shape: tuple[int, ...]) -> Any:
    x = values(np.random.default_rng(0), shape)
    return x.dtype if isinstance(x, np.ndarray | jax.Array) else jnp.result_type(x)
