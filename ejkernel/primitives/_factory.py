"""The factory of primitives: from a table of axes to a primitive with every rule, and from three of them to a trio.

A kernel primitive has five parameters: `operands`, the names of the arrays it is bound to; `results`, the names of
what it returns; `spec`, what is computed; `config`, how; and `chooser`, which gives configs to those that JAX derives
from it. The table of axes gives it shapes, shardings and vmap.

A trio is a differentiable operation:

* `x`      operands → outputs, residuals among them;
* `x_jvp`  operands, residuals, tangents → tangents of the outputs, linear in the tangents;
* `x_bwd`  operands, residuals, cotangents → cotangents of the operands: the transpose of `x_jvp`, reached only as such.

The jvp of `x` binds `x` and `x_jvp`; the transpose of `x_jvp` binds `x_bwd`, as does that of `x` in operands in which
it is linear. So `grad` costs one forward and one backward kernel. `x_bwd` is linear in its cotangents, and its
transpose binds `x_jvp` again: the three close under transposition. The jvps of `x_jvp` and `x_bwd` are those of their
XLA implementations, which `lowering` brings (`on_definition`): they give Hessians and everything beyond.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla

from ._axes import Table, shape, sizes
from ._batching import choose, fold_operand, unfold_result
from ._sharding import Layout, aligned, explicit_axes, joined, partition_spec

TANGENT, COTANGENT = "_dot", "_bar"


class Chooser(Protocol):
    """Who chooses the configs of a call: a hashable value, equal for calls that share what was traced.

    Attributes:
        platform: the one that every implementation has to be of, because a user asked for it, or "auto".
    """

    platform: str

    def config(self, primitive: "KernelPrimitive", arrays: Mapping[str, Any], spec: Any, results: Sequence[str]) -> Any:
        """The config of a tangent or backward that is about to be bound to these arrays."""


class KernelPrimitive:
    """One primitive and what the generic rules know of it.

    Attributes:
        name: of the operation, e.g. "flash_attention_bwd".
        table: the axes of every operand and result.
        layout: how axes fold and split.
        results: the results in full; a call may ask for fewer only where `like` pairs them with operands.
        like: result → the operand whose shape, dtype and sharding it has.
        sums: whether a device's part of a result that lacks an axis which is split is a part of a sum.
        dtypes: from the dtypes of the operands, and the spec, to those of the other results.
        linear: the suffix of the operands in which the primitive is linear, if any.
        primitive: the primitive of JAX.
        arguments: (arrays by name, results) → positional and keyword arguments of an implementation.
        operands: (arrays by name) → the NamedTuple of operands that `supports` looks at.
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
    ):
        self.name, self.table, self.layout, self.results = name, table, layout, tuple(results)
        self.like, self.dtypes, self.linear = dict(like or {}), dtypes, linear
        self.arguments, self.operands = arguments, operands
        self.sums = linear == COTANGENT
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_impl(partial(xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        batching.primitive_batchers[self.primitive] = self._batch
        _define(self)

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
        out = self.primitive.bind(*present.values(), **how)
        return dict(zip(results, out, strict=True))

    def split(self, operands: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """How each axis is split by the explicit shardings of the operands, and on which mesh (None without one)."""
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
        """Operands and their tangents where one of both is mapped: implementations may count on equal shapes."""
        pairs = [(name, name + TANGENT) for name in mapped if name + TANGENT in mapped]
        return {name for pair in pairs if any(mapped[name] is not None for name in pair) for name in pair}

    def _batch(self, args, dims, *, operands, results, spec, config, chooser):
        arrays, mapped = dict(zip(operands, args, strict=True)), dict(zip(operands, dims, strict=True))
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


class Trio:
    """A differentiable operation: forward, tangent and backward primitive, wired to each other.

    Args:
        name: of the operation.
        operands: a NamedTuple class of the operands.
        outputs: a NamedTuple class of the results of the forward.
        table: the axes of each of both.
        differentiable: the operands that have tangents.
        dtypes: from the operands' dtypes and the spec to the dtypes of the outputs.
        layout: how axes fold and split.
        residuals: the outputs that tangent and backward take; all by default. The others are not kept for them.
        linear: groups of operands in which the forward is linear together, the values of which no backward needs. It
            has a transpose in each of them.
    """

    def __init__(
        self, name, operands, outputs, table, differentiable, dtypes, layout=Layout(), residuals=None, linear=()
    ):
        self.name, self.operands, self.outputs, self.differentiable = name, operands, outputs, tuple(differentiable)
        self.residuals = outputs._fields if residuals is None else tuple(residuals)
        self.linear = tuple(map(tuple, linear))
        dotted = {n + TANGENT: table[n] for n in (*self.differentiable, *outputs._fields)}
        barred = {n + COTANGENT: table[n] for n in (*self.differentiable, *outputs._fields)}
        of = lambda named: operands(*map(named.get, operands._fields))
        self.forward = KernelPrimitive(
            name, table, layout, outputs._fields, dtypes=dtypes, operands=of, arguments=self._forward_arguments
        )
        self.tangent = KernelPrimitive(
            name + "_jvp",
            {**table, **dotted},
            layout,
            [n + TANGENT for n in outputs._fields],
            like={n + TANGENT: n for n in self.residuals},
            dtypes=lambda of, spec: {n + TANGENT: dtype for n, dtype in dtypes(of, spec).items()},
            linear=TANGENT,
            operands=of,
            arguments=self._tangent_arguments,
        )
        self.backward = KernelPrimitive(
            name + "_bwd",
            {**table, **barred},
            layout,
            [n + COTANGENT for n in self.differentiable],
            like={n + COTANGENT: n for n in self.differentiable},
            linear=COTANGENT,
            operands=of,
            arguments=self._backward_arguments,
        )
        self.primitives = (self.forward, self.tangent, self.backward)
        ad.primitive_jvps[self.forward.primitive] = self._jvp
        ad.primitive_transposes[self.tangent.primitive] = self._transpose_tangent
        ad.primitive_transposes[self.backward.primitive] = self._transpose_backward
        if self.linear:
            ad.primitive_transposes[self.forward.primitive] = self._transpose_forward

    def _jvp(self, primals, tangents, *, operands, results, spec, config, chooser):
        arrays = dict(zip(operands, primals, strict=True))
        out = self.forward.bind(arrays, spec=spec, config=config, chooser=chooser)
        out = {n: checkpoint_name(x, f"{self.name}_{n}") for n, x in out.items()}
        moving = {
            name: t
            for name, t in zip(operands, tangents, strict=True)
            if name in self.differentiable and type(t) is not ad.Zero
        }
        if not moving:
            return list(out.values()), [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in out.values()]
        kept = {name: out[name] for name in self.residuals}
        named = {**arrays, **kept, **{name + TANGENT: t for name, t in moving.items()}}
        return list(out.values()), list(self._derived(self.tangent, named, spec, chooser).values())

    def _transpose_tangent(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not all(n.endswith(TANGENT) for n in wanted):
            raise NotImplementedError(f"{self.tangent.name} is linear in its tangents alone, not in {wanted}")
        known = {n: x for n, x in named.items() if not n.endswith(TANGENT)}
        return self._pulled_back(cotangents, named, known, wanted, TANGENT, results, spec, chooser)

    def _transpose_backward(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not all(n.endswith(COTANGENT) for n in wanted):
            raise NotImplementedError(f"{self.backward.name} is linear in its cotangents alone, not in {wanted}")
        moving = {
            r.removesuffix(COTANGENT) + TANGENT: ct
            for r, ct in zip(results, cotangents, strict=True)
            if type(ct) is not ad.Zero
        }
        if not moving:
            return [ad.Zero(x.aval) if n in wanted else None for n, x in named.items()]
        named_tangent = {n: x for n, x in named.items() if not n.endswith(COTANGENT)} | moving
        out = self._derived(self.tangent, named_tangent, spec, chooser)
        return [out[n.removesuffix(COTANGENT) + TANGENT] if n in wanted else None for n in named]

    def _transpose_forward(self, cotangents, *args, operands, results, spec, config, chooser):
        named = dict(zip(operands, args, strict=True))
        wanted = [n for n, x in named.items() if ad.is_undefined_primal(x)]
        if not any(set(wanted) <= set(group) for group in self.linear):
            raise NotImplementedError(f"{self.name} is not linear in {' and '.join(wanted)}")
        known = {n: ad.instantiate_zeros(ad.Zero(x.aval)) if n in wanted else x for n, x in named.items()}
        return self._pulled_back(cotangents, named, known, wanted, "", results, spec, chooser)

    def _pulled_back(self, cotangents, named, known, wanted, suffix, results, spec, chooser):
        """A cotangent for each of the `wanted`, which, like the results, have their names with a suffix."""
        live = {
            r.removesuffix(suffix) + COTANGENT: ct
            for r, ct in zip(results, cotangents, strict=True)
            if type(ct) is not ad.Zero
        }
        if not live:
            return [ad.Zero(x.aval) if n in wanted else None for n, x in named.items()]
        asked = [n.removesuffix(suffix) + COTANGENT for n in wanted]
        out = self._derived(self.backward, {**known, **live}, spec, chooser, asked)
        return [out[n.removesuffix(suffix) + COTANGENT] if n in wanted else None for n in named]

    @staticmethod
    def _derived(primitive, arrays, spec, chooser, results=None):
        """The results of the tangent or backward, with the config that is chosen for it."""
        config = chooser.config(primitive, arrays, spec, results or primitive.results)
        return primitive.bind(arrays, spec=spec, config=config, chooser=chooser, results=results)

    def _group(self, of: type, named: Mapping[str, Any], suffix: str = "") -> Any:
        return of(*(named.get(name + suffix) for name in of._fields))

    def _forward_arguments(self, named, results):
        return tuple(self._group(self.operands, named)), {}

    def _tangent_arguments(self, named, results):
        primals, outputs = self._group(self.operands, named), self._group(self.outputs, named)
        return (primals, outputs, self._group(self.operands, named, TANGENT)), {}

    def _backward_arguments(self, named, results):
        primals, outputs = self._group(self.operands, named), self._group(self.outputs, named)
        wrt = tuple(name.removesuffix(COTANGENT) for name in results)
        return (primals, outputs, self._group(self.outputs, named, COTANGENT)), {"wrt": wrt}


PRIMITIVES: dict[str, KernelPrimitive] = {}
_hooks: list[Callable[[KernelPrimitive], None]] = []


def on_definition(hook: Callable[[KernelPrimitive], None]) -> None:
    """Calls `hook` with every kernel primitive, those that are defined already and those to come."""
    _hooks.append(hook)
    for primitive in PRIMITIVES.values():
        hook(primitive)


def _define(primitive: KernelPrimitive) -> None:
    PRIMITIVES[primitive.name] = primitive
    for hook in _hooks:
        hook(primitive)
