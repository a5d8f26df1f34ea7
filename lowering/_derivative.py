"""Derivatives of second order and beyond over Explicit axes: one primitive, closed under jvp, transposition and vmap.

The derivative of a tangent or backward is that of its implementation in XLA, which is code for one device. If JAX
differentiated a `jax.shard_map` around it, reverse mode would fail inside another `jax.shard_map`: JAX marks residuals
that vary over a manual axis of the outer one as split over that axis again (0.10.2 – 0.12). So the code of one device
is differentiated instead, and the `jax.shard_map` is put around the result when it is lowered. There are no residuals:
what a transpose needs is recomputed.

With y = Σ_i f_i(x), a sum over the devices i along mesh axes that split the work but not y,

    dy = Σ_i ∂f_i·dx,   x̄ = Σ_i ∂f_iᵀ·ȳ

where the latter sum is along mesh axes that split the work but not x.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.compat import without_manual_axes, without_sharding
from ejkernel.primitives._factory import KernelPrimitive
from ejkernel.primitives._sharding import explicit_axes_of, names_of, partition_spec, resharded
from ejkernel.types import Platform, Target

from ._context import one_device, own_promotions
from ._failures import Progress
from ._rule import body_of

Function = Callable[..., Sequence[Any]]
"""Arrays of one device → its parts of the results, or of sums for them; equal functions compare equal."""


class Placed(NamedTuple):
    """An array over all devices: its shape, its dtype, and its split by Explicit axes."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec


@dataclass(frozen=True)
class OverDevices:
    """A function of one device's arrays, applied on all devices.

    Attributes:
        function: the function of one device.
        operands, results: the placement of the arrays over the devices.
        mesh: the mesh of the devices.
        split: the mesh axes that split the work; a result is summed over those of them that do not split it.
    """

    function: Function
    operands: tuple[Placed, ...]
    results: tuple[Placed, ...]
    mesh: Any
    split: frozenset[str]

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results for arrays of all devices."""

        def run(*arrays):
            over = [tuple(sorted(self.split - _names(x.spec))) for x in self.results]
            parts = self.function(*arrays)
            return [jax.lax.psum(x, names) if names else x for x, names in zip(parts, over, strict=True)]

        if any(0 in x.shape for x in self.operands):
            return run(*arrays)
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=tuple(x.spec for x in self.operands),
            out_specs=[x.spec for x in self.results],
            axis_names=explicit_axes_of(self.mesh),
            check_vma=False,
        )(*arrays)

    def local_shape(self, of: Placed) -> tuple[int, ...]:
        """The shape of the part of an array that one device has."""
        parts = [math.prod(self.mesh.shape[name] for name in names_of(entry)) for entry in of.spec]
        return tuple(size // n for size, n in zip(of.shape, parts, strict=True))


def register_derivative(primitive: KernelPrimitive) -> None:
    """Gives a tangent or backward primitive the jvp of its XLA implementation, for derivatives of second order on."""
    ad.primitive_jvps[primitive.primitive] = partial(_jvp_of_linear, primitive)


def _jvp_of_linear(primitive, primals, tangents, *, operands, results, spec, config, chooser):
    named = dict(zip(operands, primals, strict=True))
    nonzero_tangents = {n: t for n, t in zip(operands, tangents, strict=True) if type(t) is not ad.Zero}
    again = partial(primitive.bind, spec=spec, config=config, chooser=chooser, results=results)
    out = list(again(named).values())
    if all(
        n.endswith(primitive.linear) for n in nonzero_tangents
    ):  # linear there: the derivative is the primitive itself
        fixed = {n: x for n, x in named.items() if not n.endswith(primitive.linear)}
        return out, list(again({**fixed, **nonzero_tangents}).values())
    places = tuple(map(operands.index, nonzero_tangents))
    tangent = Tangent(Implementation(primitive, operands, results, spec, config), places)
    avals = {n: jax.typeof(x) for n, x in named.items()}
    split, mesh = primitive.split(avals)
    if mesh is None:  # also where nothing is split: an axis that `jax.vmap` maps may be, which no type here tells
        with own_promotions():
            return out, tangent(*primals, *nonzero_tangents.values())
    placed = lambda n, shape, dtype: Placed(shape, dtype, partition_spec(primitive.table[n], shape, split))
    of_operands = [placed(n, x.shape, x.dtype) for n, x in avals.items()]
    of_results = [placed(n, *of) for n, of in primitive.result_shapes(avals, results, spec).items()]
    program = OverDevices(
        tangent,
        (*of_operands, *(of_operands[i] for i in places)),
        tuple(of_results),
        mesh,
        frozenset().union(*(_names(x.spec) for x in of_operands)),
    )
    return out, bind(program, [*primals, *nonzero_tangents.values()])


def bind(program: OverDevices, arrays: Sequence[Any]) -> list[Any]:
    """Binds the primitive, after making all arrays vary over every manual axis over which any of them does."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(sorted(frozenset().union(*axes) - of)) for of in axes]
    arrays = [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]
    return derivative_p.bind(*arrays, program=program)


# --- Functions of one device ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Implementation:
    """The XLA implementation of a primitive, as a function of arrays.

    Arrays of float16 are taken as float32, and results are rounded to their own dtype at the end: the derivative of an
    intermediate, such as that of the gradient of logits, may be beyond 65504 where that of the result is not.
    """

    primitive: KernelPrimitive
    operands: tuple[str, ...]
    results: tuple[str, ...]
    spec: Any
    config: Any

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        how = self.spec, self.config, _TARGET, Platform.XLA, Progress(self.primitive.name, _TARGET)
        named = dict(zip(self.operands, arrays, strict=True))
        shapes = self.primitive.result_shapes(named, self.results, self.spec).values()
        wide = [x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in arrays]
        found = body_of(self.primitive, self.operands, self.results, *how)(*wide)
        return [x.astype(dtype) for x, (_, dtype) in zip(found, shapes, strict=True)]


_TARGET = Target("cpu")


@dataclass(frozen=True)
class Tangent:
    """The derivative of a function along tangents of some operands, which come after all operands."""

    of: Function
    differentiated: tuple[int, ...]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        primals = arrays[: len(arrays) - len(self.differentiated)]
        along = tuple(primals[i] for i in self.differentiated)
        function = lambda *inputs: list(self.of(*_with(primals, self.differentiated, inputs)))
        return jax.jvp(function, along, tuple(arrays[len(primals) :]))[1]


@dataclass(frozen=True)
class Transpose:
    """The transpose of a function in operands in which it is linear.

    It takes the other operands, and the cotangents of some results.

    Attributes:
        of: the function.
        wanted: the positions of the linear operands, with their shapes on one device and dtypes.
        given: the positions of the results with a cotangent; the cotangents of the others are 0.
    """

    of: Function
    wanted: tuple[tuple[int, tuple[int, ...], Any], ...]
    given: tuple[int, ...]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        known = list(arrays[: len(arrays) - len(self.given)])
        places = tuple(place for place, _, _ in self.wanted)
        others = (known.pop(0) if i not in places else None for i in range(len(known) + len(places)))
        others, zeros = tuple(others), tuple(jnp.zeros(shape, dtype) for _, shape, dtype in self.wanted)
        # The derivative of a linear function is the function itself, at any point.
        results, pull = jax.vjp(lambda *inputs: list(self.of(*_with(others, places, inputs))), *zeros)
        cotangents = dict(zip(self.given, arrays[len(arrays) - len(self.given) :], strict=True))
        return pull([cotangents[i] if i in cotangents else jnp.zeros_like(x) for i, x in enumerate(results)])


@dataclass(frozen=True)
class Mapped:
    """A function under `jax.vmap`."""

    of: Function
    in_axes: tuple[int | None, ...]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        return jax.vmap(lambda *arrays: list(self.of(*arrays)), self.in_axes)(*arrays)


def _with(arrays: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, x) for i, x in enumerate(arrays)]


# --- The primitive ----------------------------------------------------------------------------------------------------


def _abstract_eval(*avals, program):
    base = avals[0]
    like = lambda x: dict(shape=x.shape, dtype=x.dtype, sharding=NamedSharding(program.mesh, x.spec))
    return [base.update(**like(x), weak_type=False) for x in program.results]


def _jvp(primals, tangents, *, program):
    differentiated = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    tangent_program = OverDevices(
        Tangent(program.function, differentiated),
        program.operands + tuple(program.operands[i] for i in differentiated),
        program.results,
        program.mesh,
        program.split,
    )
    return bind(program, primals), bind(tangent_program, [*primals, *(tangents[i] for i in differentiated)])


def _transpose(cotangents, *args, program):
    wanted = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    given = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    if not given:
        return [ad.Zero(x.aval) if i in wanted else None for i, x in enumerate(args)]
    known = [i for i in range(len(args)) if i not in wanted]
    of_device = [(i, program.local_shape(program.operands[i]), program.operands[i].dtype) for i in wanted]
    transposed = OverDevices(
        Transpose(program.function, tuple(of_device), tuple(given)),
        (*(program.operands[i] for i in known), *(program.results[i] for i in given)),
        tuple(program.operands[i] for i in wanted),
        program.mesh,
        program.split,
    )
    out = bind(transposed, [*(args[i] for i in known), *(cotangents[i] for i in given)])
    found = dict(zip(wanted, out, strict=True))
    return [found.get(i) for i in range(len(args))]


def _batch(args, dims, *, program):
    count = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    entries = [tuple(jax.typeof(x).sharding.spec)[dim] for x, dim in zip(args, dims, strict=True) if dim is not None]
    over = next((entry for entry in entries if entry is not None), None)

    def mapped(of, dim):
        spec = (*of.spec[:dim], over, *of.spec[dim:])
        return Placed((*of.shape[:dim], count, *of.shape[dim:]), of.dtype, PartitionSpec(*spec))

    operands = tuple(x if dim is None else mapped(x, dim) for x, dim in zip(program.operands, dims, strict=True))
    if entries.count(over) < len(entries):  # JAX drops the split of a single example where it reshapes a scalar of it
        to = tuple((i, NamedSharding(program.mesh, x.spec)) for i, x in enumerate(operands) if dims[i] is not None)
        moved = resharded(args[to[entries.index(over)][0]], {i: args[i] for i, _ in to}, to)
        args = [moved.get(i, x) for i, x in enumerate(args)]
    function, results = Mapped(program.function, tuple(dims)), tuple(mapped(x, 0) for x in program.results)
    of_examples = OverDevices(function, operands, results, program.mesh, program.split.union(names_of(over)))
    return bind(of_examples, args), [0] * len(program.results)


def _lower(ctx, *args, program):
    local = without_sharding if any(0 in x.shape for x in program.operands) else without_manual_axes
    with one_device():
        lower = mlir.lower_fun(program, multiple_results=True)
        return lower(ctx.replace(avals_in=[local(aval) for aval in ctx.avals_in]), *args)


def _names(spec: PartitionSpec) -> frozenset[str]:
    return frozenset(name for entry in spec for name in names_of(entry))


derivative_p = Primitive("ejkernel_derivative")
derivative_p.multiple_results = True
derivative_p.def_impl(partial(xla.apply_primitive, derivative_p))
derivative_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[derivative_p] = _jvp
ad.primitive_transposes[derivative_p] = _transpose
batching.primitive_batchers[derivative_p] = _batch
mlir.register_lowering(derivative_p, _lower)
