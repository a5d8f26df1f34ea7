"""`jax.export` transfers an operation and its gradient to other processes and platforms in one artifact."""

import jax
import jax.numpy as jnp
import pytest
from cases import (
    CASES,
    DIFFERENTIABLE,
    assert_close,
    each,
    each_by_kind,
    first_of_each,
    gradient,
    oracle,
    pullback,
)
from jax.export import DisabledSafetyCheck, deserialize, export, symbolic_shape
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel

PLATFORMS = ("cpu", "cuda", "tpu")
# JAX guarantees no compatibility of Triton calls across versions, and needs a flag that says one accepts this.
UNGUARDED = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]


def sent(case, f, *args, vjp_order=0):
    """f exported for all platforms and read back: in one artifact, or over a mesh in one for each platform.

    Over a mesh devices may take different branches, which cannot be compiled for several platforms at once.
    """
    artifacts = [(platform,) for platform in PLATFORMS] if case.over else [PLATFORMS]

    def received(platforms):
        exported = export(jax.jit(f), platforms=platforms, disabled_checks=UNGUARDED)(*args)
        return deserialize(exported.serialize(vjp_order=vjp_order))

    first, *_ = found = list(map(received, artifacts))
    assert [artifact.platforms for artifact in found] == artifacts
    return first.call


@each(CASES, rest=(pytest.mark.slow,))
def test_export(case):
    arrays = case.placed(case.arrays())
    assert_close(sent(case, case.call, arrays)(arrays), oracle(case)(arrays))


@each(first_of_each(DIFFERENTIABLE), first=())
def test_export_of_the_gradient(case):
    arrays = case.placed(case.arrays())
    cotangents = case.cotangents(arrays)
    found = sent(case, pullback(case.call, case.differentiable), arrays, cotangents)(arrays, cotangents)
    assert_close(found, oracle(case, pullback)(arrays, cotangents))


@each_by_kind(first_of_each(DIFFERENTIABLE))
def test_gradient_of_an_exported_function(case):
    arrays = case.placed(case.arrays())
    cotangents = case.cotangents(arrays)
    found = gradient(sent(case, case.call, arrays, vjp_order=1), case.differentiable)(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each_by_kind(first_of_each(CASES))
def test_export_from_a_mesh(case):
    """The artifact has the number of devices, each of which computes its shard."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    case = case.on(mesh)
    specs = case.specs({letter: "x" if letter == "b" else "y" for letter in case.split})
    arrays = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in case.arrays().items()}
    found = sent(case, case.call, arrays)(arrays)
    assert_close(found, oracle(case)(case.arrays()))
    assert [x.sharding.num_devices for x in found] == [8] * len(found)


# --- Symbolic dimensions


def types(case):
    """The types of a case's arrays with symbolic batch and lengths; the first operand is [b, tokens, …]."""
    lengths = {*"bst"}
    if not case.is_composed:
        _, tokens, *_ = next(iter(case.algorithm.forward.table.values()))
        lengths = (lengths | {tokens.letter}) - {*(case.algorithm.forward.layout.group or ())}
    letters = sorted({letter for x in case.operands.values() for letter in x.axes.split()} & lengths)
    sizes = dict(zip(letters, symbolic_shape(", ".join(letters)), strict=True))
    size = lambda letter, n: sizes.get(letter, n)
    return {
        name: jax.ShapeDtypeStruct(tuple(map(size, case.operands[name].axes.split(), x.shape)), x.dtype)
        for name, x in case.arrays().items()
    }


@each_by_kind([case for case in CASES if not case.over], rest=(pytest.mark.slow,))
def test_export_for_every_size(case):
    call = sent(case, case.call, types(case))
    cases = [case.resized(dict(b=2 * case.sizes["b"])), case] if "b" in case.sizes else [case]
    for of_batch in cases:
        assert_close(call(of_batch.arrays()), oracle(of_batch)(of_batch.arrays()))


@each(first_of_each([case for case in DIFFERENTIABLE if not case.over]), first=())
def test_gradient_of_an_exported_function_for_every_size(case):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = gradient(sent(case, case.call, types(case), vjp_order=1), case.differentiable)(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@pytest.mark.parametrize("kind", ("explicit", "shard_map", "auto"))
def test_symbolic_sizes_over_a_mesh_are_refused(kind):
    """When it loads such an artifact, JAX crashes or raises an MLIR error."""
    axis = AxisType.Auto if kind == "auto" else AxisType.Explicit
    mesh, split = jax.make_mesh((4,), ("x",), axis_types=(axis,)), PartitionSpec("x")
    f = lambda q: ejkernel.lax.flash_attention(q, q, q, causal=True)
    f = jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split) if kind == "shard_map" else f
    q = jax.ShapeDtypeStruct((*symbolic_shape("4*b"), 16, 2, 8), jnp.float32, sharding=NamedSharding(mesh, split))
    with pytest.raises(ejkernel.UnsupportedError, match=r"^flash_attention: sizes are symbolic"):
        export(jax.jit(f))(q)
