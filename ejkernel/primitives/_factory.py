"""The base of all primitives, with their names, parameters and common rules, and primitives with a table of axes.

A primitive has five parameters: `operands`, the names of the arrays it is bound to; `results`, the names of its
results; `spec`, what is computed; `config`, how; and `chooser`, which chooses the configs of primitives that JAX
derives from it.

There are two kinds. A `KernelPrimitive` has a table of axes, which determines shapes, shardings and vmap, and is
lowered to an implementation of the registry by `lowering.register`. A `TracedPrimitive` (`_traced.py`) stands for a
function of a user, whose trace determines all of these and the lowering. Three primitives make a differentiable
operation (`_trio.py`), one makes an operation without derivatives (`_forward_only.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from jax.extend.core import Primitive
from jax.interpreters import batching, xla

from ._axes import Table, shape, sizes
from ._batching import choose, fold_operand, unfold_result
from ._empty import made_where_empty
from ._sharding import Layout, aligned, explicit_axes, joined, partition_spec

TANGENT, COTANGENT = "_dot", "_bar"


@runtime_checkable
class Chooser(Protocol):
    """Chooses the configs of a call; a hashable value, equal for calls that may share a trace.

    Attributes:
        platform: the platform that a user asked for, which every implementation has to have, or "auto".
    """

    platform: str

    def config(self, primitive: "NamedPrimitive", arrays: Mapping[str, Any], spec: Any, results: Sequence[str]) -> Any:
        """The config of a tangent or backward that is about to be bound to these arrays."""


class NamedPrimitive(ABC):
    """A primitive of JAX whose operands and results have names.

    Attributes:
        name: the name of the operation, e.g. "flash_attention_bwd".
        results: the names of all results; empty if every call has its own.
        linear: the suffix of the operands in which the primitive is linear, if any.
        primitive: the primitive of JAX.
    """

    def __init__(self, name: str, results: Sequence[str] = (), linear: str | None = None) -> None:
        self.name, self.results, self.linear = name, tuple(results), linear
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_impl(partial(xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        batching.fancy_primitive_batchers[self.primitive] = self._batch

    def bind(
        self,
        arrays: Mapping[str, Any],
        *,
        spec: Any,
        config: Any,
        chooser: Chooser,
        results: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Binds the arrays that are not None and returns the results by name."""
        present = {name: x for name, x in arrays.items() if x is not None}
        results = tuple(results or self.results)
        how = dict(operands=tuple(present), results=results, spec=spec, config=config, chooser=chooser)
        out = made_where_empty(lambda *x: self.primitive.bind(*x, **how), *present.values())
        return dict(zip(results, out, strict=True))

    @abstractmethod
    def _abstract_eval(self, *avals: Any, operands, results, spec, config, chooser) -> list[Any]:
        """The types of the results."""

    def _unmapped(self, arrays: Mapping[str, Any], **how: Any) -> tuple[list[Any], list]:
        """The rule of `jax.vmap` if no operand is mapped: the call as it is."""
        out = self.bind(arrays, **how)
        return list(out.values()), [None] * len(out)

    @abstractmethod
    def _batch(self, axis: Any, args, dims, *, operands, results, spec, config, chooser) -> tuple[list[Any], list]:
        """The rule of `jax.vmap` over an axis, of which JAX gives the name and the size."""


class KernelPrimitive(NamedPrimitive):
    """A primitive with a table of axes, and the properties that the generic rules need.

    Attributes:
        table: the axes of every operand and result.
        layout: how axes fold and split.
        results: the names of all results; a call may ask for fewer only if `like` pairs them with operands.
        like: result → the operand whose shape, dtype and sharding it has.
        in_place: the operands whose buffers results take: those of `like`, but for their tangents and cotangents.
        sums: whether results without an axis that is split are sums over the devices.
        dtypes: (dtypes of the operands, spec) → dtypes of the results that are not in `like`.
        arguments: (arrays by name, results) → positional and keyword arguments of an implementation.
        operands: (arrays by name) → the NamedTuple of operands that `supports` takes.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        layout: Layout,
        results: Sequence[str],
        *,
        like: Mapping[str, str] | None = None,
        dtypes: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = lambda dtypes, spec: {},
        linear: str | None = None,
        arguments: Callable[[Mapping[str, Any], Sequence[str]], tuple[tuple, dict]],
        operands: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self.table, self.layout = table, layout
        self.like, self.dtypes = dict(like or {}), dtypes
        self.arguments, self.operands = arguments, operands
        self.in_place = frozenset() if linear else frozenset(self.like.values())
        self.sums = linear == COTANGENT
        PRIMITIVES[name] = self
        super().__init__(name, results, linear)

    def split(self, operands: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The split of each axis by the Explicit shardings of the operands, and their mesh, None without one."""
        sharded = [x for x in operands.values() if explicit_axes(x)]
        if not sharded:
            return {}, None
        mesh = sharded[0].sharding.mesh
        specs = {name: x.sharding.spec for name, x in operands.items()}
        return joined(self.name, self.table, self.layout, operands, specs, mesh), mesh

    def result_shapes(self, operands: Mapping[str, Any], results: Sequence[str], spec: Any) -> dict[str, tuple]:
        """Shape and dtype of each result."""
        size_of = sizes(self.name, self.table, operands)
        dtypes = self.dtypes({name: x.dtype for name, x in operands.items()}, spec)
        return {
            name: (operands[self.like[name]].shape, operands[self.like[name]].dtype)
            if name in self.like
            else (shape(self.table[name], size_of), dtypes[name])
            for name in results
        }

    def _abstract_eval(self, *avals, operands, results, spec, config, chooser):
        named = dict(zip(operands, avals, strict=True))
        split, _ = self.split(named)
        varying = max(avals, key=lambda aval: len(aval.manual_axis_type.varying))
        base = next((aval for aval in avals if explicit_axes(aval)), varying)

        def result(name, shape, dtype):
            sharding = base.sharding.update(spec=partition_spec(self.table[name], shape, split))
            manual = varying.manual_axis_type
            return base.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding, manual_axis_type=manual)

        return [result(name, *of) for name, of in self.result_shapes(named, results, spec).items()]

    def _moved(self, mapped: Mapping[str, int | None]) -> set[str]:
        """The operands of which they or their tangents are mapped: implementations rely on equal shapes of both."""
        pairs = [(name, name + TANGENT) for name in mapped if name + TANGENT in mapped]
        return {name for pair in pairs if any(mapped[name] is not None for name in pair) for name in pair}

    def _batch(self, axis, args, dims, *, operands, results, spec, config, chooser):
        arrays, mapped = dict(zip(operands, args, strict=True)), dict(zip(operands, dims, strict=True))
        if all(dim is None for dim in dims):
            return self._unmapped(arrays, spec=spec, config=config, chooser=chooser, results=results)
        fold = choose(self.table, self.layout, arrays, mapped, results)
        paired = {self.like[name] for name in results if name in self.like} | self._moved(mapped)
        folded = {
            name: fold_operand(x, mapped[name], self.table[name], fold, paired=name in paired)
            for name, x in arrays.items()
        }
        folded = aligned(self.name, self.table, self.layout, folded)
        out = self.bind(folded, spec=spec, config=config, chooser=chooser, results=results)

        def unfold(name, x):
            at = next(i for i, axis in enumerate(self.table[name]) if axis.letter == fold.letter)
            size = fold.size
            if name in self.like:
                like, dim = arrays[self.like[name]], mapped[self.like[name]]
                size = tuple(s for i, s in enumerate(like.shape) if i != dim)[at]
            return unfold_result(x, self.table[name], fold, size)

        return [unfold(name, x) for name, x in out.items()], [0] * len(out)


PRIMITIVES: dict[str, KernelPrimitive] = {}
"""The primitives with a table of axes, by name."""
