"""`jax.export` carries an operation and its gradient to other processes and platforms in one artifact."""

import jax
from cases import CASES, assert_close, each, each_case, each_operation, first_of_each, gradient, oracle, pullback
from jax.export import DisabledSafetyCheck, deserialize, export
from jax.sharding import AxisType, NamedSharding

PLATFORMS = ("cpu", "cuda", "tpu")
# JAX guarantees no compatibility of Triton's calls over versions, and wants to be told that one does without.
UNGUARDED = [DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]


def sent(f, *args, vjp_order=0):
    """f exported for all platforms, as another process would read it."""
    exported = export(jax.jit(f), platforms=PLATFORMS, disabled_checks=UNGUARDED)(*args)
    received = deserialize(exported.serialize(vjp_order=vjp_order))
    assert received.platforms == PLATFORMS
    return received.call


@each_case
def test_export(case):
    arrays = case.arrays()
    assert_close(sent(case.call, arrays)(arrays), oracle(case)(arrays))


@each(first_of_each(CASES), first=())
def test_export_of_the_gradient(case):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = sent(pullback(case.call, case.differentiable), arrays, cotangents)(arrays, cotangents)
    assert_close(found, oracle(case, pullback)(arrays, cotangents))


@each_operation
def test_gradient_of_what_was_exported(case):
    arrays = case.arrays()
    cotangents = case.cotangents(arrays)
    found = gradient(sent(case.call, arrays, vjp_order=1), case.differentiable)(arrays, cotangents)
    assert_close(found, oracle(case, gradient)(arrays, cotangents))


@each_operation
def test_export_from_a_mesh(case):
    """The artifact is for as many devices, and each computes its part."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    specs = case.specs({letter: "x" if letter == "b" else "y" for letter in case.trio.forward.layout.split})
    arrays = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in case.arrays().items()}
    found = sent(case.call, arrays)(arrays)
    assert_close(found, oracle(case)(case.arrays()))
    assert [x.sharding.num_devices for x in found] == [8] * len(found)
