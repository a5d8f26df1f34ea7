"""Over a mesh of eight devices the numbers do not change, and no unnecessary collective is run.

Batch elements and heads are computed independently, so neither a result nor the gradient of an operand that is split
like them needs a collective. The gradient of an operand that devices share takes one all-reduce.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    DIFFERENTIABLE,
    assert_close,
    called_alone,
    curvature,
    each_by_kind,
    first_of_each,
    gradient,
    oracle,
    with_primitives,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    BATCH,
    both,
    call_of,
    check,
    each_call,
    each_called_alone,
    each_operation_and_transform,
    each_program,
    each_type,
    mesh_axes,
    mesh_for,
    mesh_of,
    needed,
    others,
    placed,
    rest,
)


@each_program(CASES, rest=(pytest.mark.slow,))
def test_explicit(case, transform):
    assert check(case, transform, both(case), mesh_for(case, AxisType.Explicit)) == needed(case, both(case), transform)


@each_program(CASES, rest=(pytest.mark.slow,), second=(pytest.mark.slow,))
def test_auto(case, transform):
    """XLA may sum second derivatives, which are plain JAX, in several steps; it must not gather anything."""
    found, minimum = (
        check(case, transform, both(case), mesh_for(case, AxisType.Auto)),
        needed(case, both(case), transform),
    )
    assert found == minimum or (transform is curvature and found.keys() == minimum.keys())


@each_call(first_of_each(CASES), {"eval": None})
@each_type
@pytest.mark.parametrize("split", (lambda case: BATCH, rest), ids=("batch", "rest"))
def test_one_split(case, transform, types, split):
    assert check(case, transform, split(case), mesh_of(types)) == Counter()


@each_called_alone
@each_type
def test_batch_over_two_axes_of_the_mesh(case, types, transform):
    split = {"b": ("x", "y")}
    found = check(case, transform, split, mesh_of(types, shape=(2, 2)))
    assert found == needed(case, split, transform)


@each_call(first_of_each(CASES), {"eval": None, "grad": gradient})
def test_vmap_over_an_explicit_axis(case, transform):
    """The mapped axis of one operand, or of all, is split: each device computes its part of the batch alone."""
    mesh = mesh_of(shape=(2, 4))
    case = case.on(mesh)
    examples = [call_of(case, transform, seed=seed)[1] for seed in range(2)]
    f = call_of(case, transform)[0]
    names, specs = tuple(case.operands), case.specs({})
    # A call over a mesh has its arrays there: JAX cannot transpose it under `vmap` over an Explicit axis otherwise.
    first = placed(case, examples[0], {}, mesh) if case.over else examples[0]
    for mapped in (names[:1], names[-1:], names):
        axes = {name: 0 if name in mapped else None for name in case.operands}
        stack = lambda n: jax.device_put(jnp.stack([e[0][n] for e in examples]), NamedSharding(mesh, P("x", *specs[n])))
        arrays = {n: stack(n) if n in mapped else x for n, x in first[0].items()}
        args = (arrays, *first[1:])
        compiled = jax.jit(jax.vmap(f, (axes, *[None] * (len(args) - 1))), keep_unused=True).lower(*args).compile()
        found = compiled(*args)
        for i, example in enumerate(examples):
            alone = {name: (example if name in mapped else examples[0])[0][name] for name in case.operands}
            part = jax.tree.map(lambda x, i=i: np.asarray(x)[i], found)
            assert_close(part, oracle(case, transform)(alone, *examples[0][1:]), what=f"{mapped} mapped, example {i}: ")
        assert others(case, compiled) == Counter(), mapped


@each_operation_and_transform
@each_type
def test_under_set_mesh(case, types, transform):
    mesh = mesh_of(types)
    assert check(case, transform, both(case), mesh, jax.set_mesh(mesh)) == needed(case, both(case), transform)


LOCAL = [case for case in CASES if case.local]


@each_program(LOCAL, rest=(pytest.mark.slow,), second=(pytest.mark.slow,))
def test_shard_map(case, transform):
    """Each device calls the operation on its shards, and `shard_map` sums the gradients of shared operands."""
    check_shard_map(case, transform, check_vma=True)


@each_call(first_of_each(LOCAL), {"eval": None, "grad": gradient, "curvature": curvature})
def test_shard_map_without_check_vma(case, transform):
    check_shard_map(case, transform, check_vma=False)


def check_shard_map(case, transform, check_vma):
    mesh, specs = mesh_of(), case.specs(both(case))
    call = jax.shard_map(
        case.call,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=case.result_specs(both(case)),
        axis_names=mesh_axes(specs.values()),
        check_vma=check_vma,
    )
    assert check(case, transform, both(case), mesh, call=call) == needed(case, both(case), transform)


@pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    reason="jax 0.10 gathers what is split over an Explicit axis inside a shard_map over another axis",
    strict=True,
)
@each_called_alone
def test_shard_map_over_the_batch(case, transform):
    """The other mesh axis, which splits the heads, remains Explicit inside."""
    mesh, specs, results = mesh_of(), case.specs(BATCH), case.result_specs(BATCH)
    call = jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names={"x"})
    assert check(case, transform, both(case), mesh, call=call) == needed(case, both(case), transform)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] if case.operation != "flash_attention" else [])
        for case in first_of_each(called_alone(DIFFERENTIABLE))
    ],
)
def test_second_derivative_in_a_shard_map_over_the_batch(case):
    """It varies over the Manual axis beside the Explicit one.

    Forward over reverse: the residuals of a transpose are split over both axes, which JAX does not lower there.
    """
    mesh, specs, results = mesh_of(), case.specs(BATCH), case.result_specs(BATCH)
    call = jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names={"x"})
    check(case, curvature, both(case), mesh, call=call)


@each_called_alone
def test_shard_map_over_the_batch_beside_an_auto_axis(case, transform):
    """XLA splits or gathers over the other mesh axis; the numbers do not change."""
    mesh, specs, results = mesh_of(AxisType.Auto), case.specs(BATCH), case.result_specs(BATCH)
    call = jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names={"x"})
    f, args = call_of(case, transform, call)
    assert_close(jax.jit(f)(*placed(case, args, both(case), mesh)), oracle(case, transform)(*args))


# --- What cannot be sharded -------------------------------------------------------------------------------------------


def whole_axes(case):
    """The letters of axes that must be whole, and that two devices could split."""
    letters = {axis for x in case.operands.values() for axis in x.axes.split() if axis.isalpha()} - {*case.split_with}
    return sorted(letter for letter in letters.difference(case.split) if case.sizes[letter] % 2 == 0)


def batched(case):
    """The operands that begin with the batch."""
    return [name for name, x in case.operands.items() if x.axes.split()[:1] == ["b"]]


@each_by_kind(with_primitives(CASES), rest=(pytest.mark.slow,))
def test_explicit_axis_that_must_be_whole(case):
    """The error names the axis, the mesh axes that split it, and an alternative."""
    for letter in whole_axes(case):
        (arrays,) = placed(case, (case.arrays(),), {letter: "y"}, mesh_of())
        with pytest.raises(ValueError) as error:
            jax.make_jaxpr(case.call)(arrays)
        message = str(error.value)
        assert re.match(rf"{case.operation}: axis \w+ of \w+ is sharded over 'y'; it must be whole", message), message
        assert case.algorithm.forward.layout.advice in message


@each_call(first_of_each(CASES), {"eval": None})
def test_auto_axis_that_must_be_whole(case, transform):
    """XLA gathers it, as for any operation that cannot be split."""
    mesh = mesh_of(AxisType.Auto)
    case = case.on(mesh)
    other = "x" if case.over else "y"  # over which the operation is not called
    for letter in [letter for letter in whole_axes(case) if case.sizes[letter] % mesh.shape[other] == 0]:
        (arrays,) = placed(case, (case.arrays(),), {letter: other}, mesh)
        assert_close(jax.jit(case.call)(arrays), oracle(case, transform)(case.arrays()), what=f"{letter} sharded: ")


@each_call(first_of_each(CASES), {"eval": None})
def test_auto_operands_that_disagree(case, transform):
    """XLA moves what is necessary."""
    mesh = mesh_of(AxisType.Auto, shape=(2, 4))
    case = case.on(mesh)
    (arrays,) = placed(case, (case.arrays(),), BATCH, mesh)
    first, x = next(iter(arrays.items()))
    other = "y" if x.shape[0] % mesh.shape["y"] == 0 else "x"  # packed tokens are no multiple of any number
    for spec in (P(other), P(*[None] * (x.ndim - 2), "x")):
        arrays[first] = jax.device_put(arrays[first], NamedSharding(mesh, spec))
        assert_close(jax.jit(case.call)(arrays), oracle(case, transform)(case.arrays()), what=f"{first} over {spec}: ")


@each_by_kind([case for case in with_primitives(CASES) if len(batched(case)) > 1])
def test_operands_that_disagree(case):
    """The batch of one operand is split over one mesh axis, that of the others over another."""
    mesh = mesh_of(shape=(2, 4))
    (arrays,) = placed(case, (case.arrays(),), BATCH, mesh)
    name = batched(case)[0]
    arrays[name] = jax.device_put(arrays[name], NamedSharding(mesh, P("y")))
    with pytest.raises(ValueError, match=rf"{case.operation}: axis b is sharded over 'y' and, in \w+, over 'x'; "):
        jax.make_jaxpr(case.call)(arrays)


@each_by_kind([case for case in called_alone(first_of_each(CASES)) if case.sizes.get("g", 1) > 1 and "b" in case.sizes])
def test_axes_that_disagree(case):
    """The batch of one operand and the heads of another are split over the same mesh axis."""
    mesh = mesh_of()
    (arrays,), (other,) = (placed(case, (case.arrays(),), split, mesh) for split in ({"b": "y"}, {"g": "y"}))
    with pytest.raises(ValueError, match=rf"{case.operation}: axes (b and g|g and b) are both sharded over 'y'; a "):
        jax.make_jaxpr(case.call)(arrays | {n: other[n] for n, x in case.operands.items() if "g" in x.axes.split()})


@each_by_kind([case for case in called_alone(CASES) if 1 < case.sizes.get("g", 1) < 4], rest=(pytest.mark.slow,))
def test_fewer_key_value_heads_than_devices(case):
    """Explicit: an error with both numbers. Auto: XLA gathers the heads."""
    explicit, automatic = (mesh_of(types, shape=(2, 4)) for types in (AxisType.Explicit, AxisType.Auto))
    (arrays,) = placed(case, (case.arrays(),), {"h": "y"}, explicit)
    number = case.sizes["g"]
    with pytest.raises(ValueError, match=rf"{number} key/value heads cannot be sharded over the 4 devices of 'y'"):
        jax.make_jaxpr(case.call)(arrays)
    (arrays,) = placed(case, (case.arrays(),), {"h": "y"}, automatic)
    assert_close(jax.jit(case.call)(arrays), oracle(case)(case.arrays()))
