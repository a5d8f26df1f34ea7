"""Second derivatives over a mesh with some Manual axes, in every order of forward and reverse mode.

`jax.shard_map` over only the batch leaves the axis that splits the heads Explicit: residuals of a transpose vary over
both. Operations that are called over a mesh axis are over that one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    DIFFERENTIABLE,
    assert_close,
    curvature,
    curvature_by_reverse,
    first_of_each,
    gradient,
    oracle,
    tangent,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import BATCH, both, mesh_of, placed

from ejkernel import lax


def reverse_over_forward(f, wrt):
    """(arrays, cotangents, tangents) -> the gradient of ⟨cotangents, J·tangents⟩."""
    return lambda arrays, cotangents, tangents: gradient(lambda x: tangent(f, wrt)(x, tangents)[1], wrt)(
        arrays, cotangents
    )


def check(case, order, split, mesh, call=None):
    """The second derivative, compared with the formula's."""
    case = case.on(mesh)
    arrays, tangents = case.arrays(), case.tangents()
    args = arrays, case.cotangents(arrays), tangents
    f = order(call or case.call, case.differentiable)
    assert_close(jax.jit(f)(*placed(case, args, split, mesh)), oracle(case, curvature)(*args))


def over_the_batch(case, mesh, **options):
    specs, results = case.specs(BATCH), case.result_specs(BATCH)
    return jax.shard_map(case.call, mesh=mesh, in_specs=(specs,), out_specs=results, axis_names={"x"}, **options)


ORDERS = {"reverse_over_reverse": curvature_by_reverse, "reverse_over_forward": reverse_over_forward}
each_order = pytest.mark.parametrize(
    ("case", "order"),
    [
        pytest.param(
            case,
            order,
            id=f"{case}-{name}",
            marks=() if case.operation == "flash_attention" and order is curvature_by_reverse else (pytest.mark.slow,),
        )
        for case in first_of_each(DIFFERENTIABLE)
        for name, order in ORDERS.items()
    ],
)


@each_order
def test_in_a_shard_map_over_the_batch(case, order):
    mesh = mesh_of(shape=(2, 2))
    call = None if case.over else over_the_batch(case, mesh)
    check(case, order, both(case), mesh, call=call)


FLASH = next(case for case in DIFFERENTIABLE if case.operation == "flash_attention")


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_shard_map_without_check_vma(order):
    mesh = mesh_of(shape=(2, 2))
    check(FLASH, order, both(FLASH), mesh, call=over_the_batch(FLASH, mesh, check_vma=False))


@pytest.mark.slow
def test_third_order():
    """The gradient of a directional second derivative, over Explicit axes with and without a Manual one."""

    def third(f, wrt):
        def run(arrays, cotangents, tangents):
            second = lambda x: list(curvature_by_reverse(f, wrt)(x, cotangents, tangents).values())
            return gradient(second, wrt)(arrays, [tangents[name] for name in arrays if name in wrt])

        return run

    mesh, arrays, tangents = mesh_of(shape=(2, 2)), FLASH.arrays(), FLASH.tangents()
    args = arrays, FLASH.cotangents(arrays), tangents
    for call in (FLASH.call, over_the_batch(FLASH, mesh)):
        found = jax.jit(third(call, FLASH.differentiable))(*placed(FLASH, args, both(FLASH), mesh))
        assert_close(found, oracle(FLASH, third)(*args))


@pytest.mark.slow
def test_gradient_of_a_vmap_inside_jit():
    """The second derivative of each example, mapped in its own jitted program before it is differentiated.

    Examples are split over their own mesh axis; all share keys and values.
    """
    mesh = jax.make_mesh((2, 2, 2), ("z", "x", "y"), axis_types=(AxisType.Explicit,) * 3)
    arrays = FLASH.arrays()
    rest = {name: x for name, x in arrays.items() if name != "q"}
    q = jnp.stack([arrays["q"], arrays["q"][::-1]])

    def loss_of(call):
        return lambda q, rest: jax.grad(
            lambda q, rest: (jax.jit(jax.vmap(slope(call), (0, None)))(q, rest) ** 2).sum(), (0, 1)
        )(q, rest)

    def slope(call):
        return jax.grad(lambda q, rest: (call({"q": q, **rest})[0] ** 2).sum())

    moving = {name: x for name, x in rest.items() if name in FLASH.differentiable}
    still = {name: x for name, x in rest.items() if name not in moving}
    specs = FLASH.specs(both(FLASH))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    on_mesh = lambda x: {name: put(a, specs[name]) for name, a in x.items()}
    program = lambda call, still: loss_of(lambda x: call({**x, **still}))
    found = jax.jit(program(FLASH.call, on_mesh(still)))(put(q, P("z", *specs["q"])), on_mesh(moving))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (q, moving))
        wanted = jax.jit(program(FLASH.formula, still))(*wide)
    assert_close(found, jax.tree.map(np.asarray, wanted))


RECURRENCES = {
    "gla": dict(gk=True),
    "lightning_attention": dict(layer_idx=0, num_layers=2),
    "recurrent": dict(),
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", RECURRENCES)
def test_a_sequence_over_a_manual_axis_beside_explicit_heads(operation):
    """A recurrence with `axis_name`: the gradient of the square of a gradient."""
    options = dict(RECURRENCES[operation])
    mesh = jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    shapes = dict(q=(2, 8, 4, 8), k=(2, 8, 2, 8), v=(2, 8, 2, 16))
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if options.pop("gk", False):
        arrays["gk"] = -np.abs(rng.standard_normal((2, 8, 4, 8))).astype(np.float32)
    call = lambda x, **over: getattr(lax, operation)(**x, **options, **over)
    on_devices = jax.shard_map(
        lambda x: call(x, axis_name="x"), mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"), axis_names={"x"}
    )

    def twice(f):
        once = jax.grad(lambda x: jnp.sin(f(x)).sum())
        return jax.grad(lambda x: sum((dx**2).sum() for dx in once(x).values()))

    x = {name: jax.device_put(a, NamedSharding(mesh, P(None, "x", "b"))) for name, a in arrays.items()}
    assert_close(jax.jit(twice(on_devices))(x), jax.jit(twice(call))(arrays), 2e-5)


@pytest.mark.parametrize("operation", RECURRENCES)
def test_a_sequence_over_devices_promotes_nothing(operation):
    """Traced without implicit promotion, as all tests of this folder."""
    options = dict(RECURRENCES[operation])
    gated = options.pop("gk", False)
    x = dict.fromkeys(
        ("q", "k", "v", "gk") if gated else ("q", "k", "v"), jax.ShapeDtypeStruct((1, 8, 2, 8), "float32")
    )
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    call = lambda x: getattr(lax, operation)(**x, **options, axis_name="x")
    over_devices = jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x"))
    assert jax.eval_shape(over_devices, x).shape == (1, 8, 2, 8)


def test_a_vmap_over_an_explicit_axis():
    """Examples of which some operands are split, lengths among them: the mapped axis is in the type of no array."""
    case = next(case for case in DIFFERENTIABLE if str(case) == "flash_attention-packed")
    mesh, (one, other) = mesh_of(shape=(2, 4)), (case.arrays(seed) for seed in range(2))
    for mapped in (tuple(one), ("k", "v", "cu_seqlens_q")):
        examples = [one, {name: (other if name in mapped else one)[name] for name in one}]
        axes = {name: 0 if name in mapped else None for name in one}
        second = lambda arrays: curvature(case.call, case.differentiable)(arrays, case.cotangents(one), case.tangents())
        stacked = {n: jnp.stack([x[n] for x in examples]) if n in mapped else one[n] for n in one}
        put = lambda n, x, mapped=mapped: jax.device_put(x, NamedSharding(mesh, P("x") if n in mapped else P()))
        with jax.set_mesh(mesh):
            found = jax.jit(jax.vmap(second, (axes,)))({n: put(n, x) for n, x in stacked.items()})
        for i, arrays in enumerate(examples):
            wanted = oracle(case, curvature)(arrays, case.cotangents(one), case.tangents())
            assert_close(jax.tree.map(lambda x, i=i: np.asarray(x)[i], found), wanted)


def test_a_vmap_of_one_example_on_one_device():
    """With a scale of the example: its array is of rank 0 without the mapped axis."""
    mesh = mesh_of(shape=(1, 8))
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((1, 2, 6, 2, 8)).astype(np.float32) for _ in "qkv"]
    x.append(np.asarray([0.3], np.float32))
    loss = lambda q, k, v, scale: jnp.sin(lax.flash_attention(q, k, v, softmax_scale=scale)).sum()
    second = jax.jit(jax.vmap(lambda *x: jax.jvp(jax.grad(loss, (0, 1, 2, 3)), x, x)[1]))
    assert_close(second(*(jax.device_put(a, NamedSharding(mesh, P("x"))) for a in x)), second(*x))
