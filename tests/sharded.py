"""Calls over a mesh of eight devices: placement of arrays, the numbers, and the collectives of the program."""

import contextlib
from collections import Counter

import jax
import pytest
from cases import (
    CASES,
    assert_close,
    called_alone,
    core_of_kind,
    curvature,
    first_of_each,
    gradient,
    oracle,
    tangent,
)
from jax.sharding import AxisType, NamedSharding
from programs import collectives

BATCH = {"b": "x"}
each_type = pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))


def each_call(cases, transforms):
    """Each case with the transforms of it by name, without derivatives where there are none.

    The first case of each kind of operation, which determines its rules, is a core test; the others are slow.
    """
    marks = lambda case: core_of_kind(case, cases) or pytest.mark.slow
    calls = [
        pytest.param(case, f, id=f"{case}-{name}", marks=marks(case))
        for case in cases
        for name, f in transforms.items()
        if f is None or case.differentiable
    ]
    return pytest.mark.parametrize(("case", "transform"), calls)


each_operation_and_transform = each_call(first_of_each(CASES), {"eval": None, "grad": gradient})
each_called_alone = each_call(first_of_each(called_alone(CASES)), {"eval": None, "grad": gradient})


def each_program(cases, rest=(), second=()):
    """The forward and gradient of each case, and a second derivative for the first one of each operation.

    The former two of the first case of each kind are core tests; other cases have the marks of `rest`. Second
    derivatives, the slowest tests, have the marks of `second` unless the case is the first of its kind. The gradient of
    operations that are called over a mesh is always tested.
    """
    over = lambda transform: () if transform is gradient else (pytest.mark.slow,)
    marks_of_second = lambda case: () if core_of_kind(case, cases) else second
    of = {"eval": None, "grad": gradient}
    programs = [
        pytest.param(
            case,
            transform,
            id=f"{case}-{name}",
            marks=rest
            if not is_first
            else over(transform)
            if case.over
            else marks_of_second(case)
            if transform is curvature
            else core_of_kind(case, cases),
        )
        for case in cases
        for is_first in [case in first_of_each(cases)]
        for name, transform in (of | {"curvature": curvature} if is_first else of).items()
        if transform is None or case.differentiable
    ]
    return pytest.mark.parametrize(("case", "transform"), programs)


def mesh_of(types=AxisType.Explicit, shape=(4, 2)):
    return jax.make_mesh(shape, ("x", "y"), axis_types=(types,) * 2)


def mesh_for(case, types=AxisType.Explicit):
    """A mesh of eight devices, or of four where the batch of a case is 2."""
    return mesh_of(types, shape=(2 if case.sizes.get("b") == 2 else 4, 2))


def call_of(case, transform, call=None, seed=0):
    """The call, or a transform of it, and its arguments."""
    arrays, call = case.arrays(seed), call or case.call
    if transform is None:
        return call, (arrays,)
    if transform is tangent:
        return tangent(call, case.differentiable), (arrays, case.tangents())
    tangents = (case.tangents(),) if transform is curvature else ()
    return transform(call, case.differentiable), (arrays, case.cotangents(arrays), *tangents)


def placed(case, args, split, mesh):
    """The arguments on a mesh."""
    specs = (case.specs(split), case.result_specs(split), case.specs(split))
    specs = [{name: of[name] for name in x} if isinstance(x, dict) else of for x, of in zip(args, specs, strict=False)]
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), args, tuple(specs))


def rest(case):
    """Axes other than the batch that may be split, heads for example, over the other mesh axis."""
    return {letter: "y" for letter in case.split if letter != "b"}


def both(case):
    return BATCH | rest(case)


def mesh_axes(specs):
    return {name for spec in specs for name in spec if name is not None}


def needed(case, split, transform):
    """The collectives that the program needs."""
    if transform is None:
        return Counter()
    specs = case.specs(split)
    shared = [name for name in case.differentiable if mesh_axes([specs[name]]) != mesh_axes(specs.values())]
    # An array that the devices of a ring share is summed over the batch first, and by `shard_map` over the ring.
    split_by_ring = set(case.over.split) if case.over else set()
    over_ring = [name for name in shared if case.over and split_by_ring.isdisjoint(case.operands[name].axes.split())]
    return +Counter({"all-reduce": sum(case.operands[name].sums for name in shared) + len(over_ring)})


def check(case, transform, split, mesh, context=contextlib.nullcontext(), call=None):
    """Checks the numbers and that results are sharded like operands; returns collectives not the operation's own."""
    case = case.on(mesh)
    f, args = call_of(case, transform, call)
    wanted, args = oracle(case, transform)(*args), placed(case, args, split, mesh)
    with context:
        compiled = jax.jit(f, keep_unused=True).lower(*args).compile()  # a linear operation does not use them
        found = compiled(*args)
    assert_close(found, wanted)
    if transform is None:
        for x, spec in zip(found, case.result_specs(split), strict=True):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    return others(case, compiled)


def others(case, compiled):
    """The collectives of a program other than the kinds that the operation itself uses."""
    own = case.over.communicates if case.over else ()
    return Counter({kind: n for kind, n in collectives(compiled.as_text()).items() if kind not in own})
