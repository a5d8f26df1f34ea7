"""A linear recurrence over a sharded sequence, beside other axes of a mesh and in other transforms."""

import jax
import jax.numpy as jnp
import pytest
from cases import assert_close, oracle, pullback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel
from ejkernel import lax, modules
from tests.sequence_shards import CASES, mesh_of, sharded, specs_of

# --- Programs ---------------------------------------------------------------------------------------------------------


def local_call(size, length=64, **options):
    """gla on shards, and the types of the shards."""
    mesh = mesh_of(size, AxisType.Explicit)
    sharding = NamedSharding(mesh, P(None, "x"))
    x = {
        n: jax.ShapeDtypeStruct((1, length * size, 2, 8), jnp.float32, sharding=sharding) for n in ("q", "k", "v", "gk")
    }
    call = lambda x: lax.gla(**x, axis_name="x", **options)
    return jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), x


def squares(f):
    return jax.grad(lambda x: (f(x) ** 2).sum())


def compiled(f, x):
    return jax.jit(f).lower(x).compile()


@pytest.mark.core
def test_collectives():
    """States are gathered once, and their gradients scattered once; the final state takes one more all-reduce."""
    f, x = local_call(8)
    assert collectives(compiled(f, x).as_text()) == {"all-gather": 1}
    assert collectives(compiled(squares(f), x).as_text()) == {"all-gather": 1, "reduce-scatter": 1}
    mesh = mesh_of(8, AxisType.Explicit)
    call = lambda x: lax.gla(**x, axis_name="x", return_state=True)
    with_state = jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=(P(None, "x"), P()))
    assert collectives(compiled(with_state, x).as_text()) == {"all-gather": 1, "all-reduce": 1}


def test_the_output_and_the_gradients_are_computed_once():
    """Each in one call, after a call that computes only states, or only their cotangents."""
    f, x = local_call(2)
    outputs = [e.params["spec"].return_output for e in equations(jax.make_jaxpr(f)(x), "gla")]
    assert outputs == [False, True]
    found = equations(jax.make_jaxpr(squares(f))(x), "gla_bwd")
    assert [e.params["results"] for e in found if e.primitive.name == "gla_bwd"] == [
        ("initial_state_bar",),
        ("q_bar", "k_bar", "v_bar", "gk_bar"),
    ]


@pytest.mark.slow
def test_the_memory_of_a_gradient_is_that_of_a_shard():
    """Twice the tokens over twice the devices need no more memory per device; half of the tokens need half as much."""

    def temporary(size, length):
        f, x = local_call(size, length)
        return compiled(squares(f), x).memory_analysis().temp_size_in_bytes

    assert temporary(8, 1024) < 1.1 * temporary(4, 1024)
    assert temporary(4, 2048) < 0.6 * temporary(4, 4096)


# --- Within other programs --------------------------------------------------------------------------------------------


def of_sines(f):
    return lambda x: sum(jnp.sin(y * 3).sum() for y in f(x))


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
@pytest.mark.parametrize("manual", ({"x", "b"}, {"x"}), ids=("all_manual", "rest_not"))
@pytest.mark.parametrize("check_vma", (True, pytest.param(False, marks=pytest.mark.slow)), ids=("checked", "unchecked"))
def test_beside_heads_that_are_sharded(types, manual, check_vma):
    """The heads over another axis, Manual or not."""
    of, mesh = CASES["gla"], jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    x = of.arrays()
    specs = {name: P(None, "b") if name == "initial_state" else P(None, "x", "b") for name in x}
    only_manual = lambda spec: P(*(axis if axis in manual else None for axis in spec))
    inner = {name: only_manual(spec) for name, spec in specs.items()}
    results = [only_manual(P(None, "x", "b")), only_manual(P(None, "b"))]
    call = lambda x: of.call(x, axis_name="x")
    over = dict(mesh=mesh, in_specs=(inner,), out_specs=results, axis_names=manual, check_vma=check_vma)
    f = jax.jit(jax.shard_map(call, **over))
    x = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}
    loss = of_sines(f)
    wanted = jax.value_and_grad(of_sines(of.call))(of.arrays())
    assert_close(jax.jit(jax.value_and_grad(loss))(x), wanted, 2e-5)


def test_explicit_heads_without_a_state():
    """The initial state of zeros is sharded like the heads."""
    mesh = jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P(None, "x", "b"))
    shapes = dict(q=(2, 8, 4, 8), k=(2, 8, 2, 8), v=(2, 8, 2, 16))
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for name, shape in shapes.items()}
    call = lambda x: lax.recurrent(**x, axis_name="x", return_state=True)
    results = P(None, "x"), P()
    f = jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=results, axis_names={"x"})
    found = jax.eval_shape(lambda x: (f(x), jax.grad(of_sines(f))(x)), x)
    assert found[0][1].sharding.spec == P(None, "b", None, None)


def test_a_sequence_over_two_axes():
    of, mesh = (
        CASES["gla"],
        jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2),
    )
    specs = {name: P() if name == "initial_state" else P(None, ("a", "b")) for name in of.operands}
    call = lambda x: of.call(x, axis_name=("a", "b"))
    f = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=[P(None, ("a", "b")), P()])
    assert_close(jax.jit(f)(of.arrays()), oracle(of)(of.arrays()), 2e-5)


def test_vmap_and_checkpoint():
    """A mapped axis outside shard_map and one inside, and a checkpoint around the layer."""
    of = CASES["gla"]
    stacked = {name: jnp.stack([x, x[::-1]]) for name, x in of.arrays().items()}
    layer = jax.checkpoint(sharded(of, 2))
    found = jax.jit(jax.value_and_grad(of_sines(jax.vmap(layer))))(stacked)
    assert_close(found, jax.value_and_grad(of_sines(jax.vmap(of.call)))(stacked), 2e-5)
    specs = {name: P(None, *spec) for name, spec in specs_of(stacked).items()}
    within = jax.vmap(lambda x: of.call(x, axis_name="x"))
    within = jax.shard_map(within, mesh=mesh_of(2), in_specs=(specs,), out_specs=[P(None, None, "x"), P()])
    assert_close(jax.jit(within)(stacked), jax.vmap(of.call)(stacked), 2e-5)


def test_without_check_vma():
    of = CASES["gla"]
    arrays, mesh = of.arrays(), mesh_of(2)
    call = lambda x: of.call(x, axis_name="x")
    f = jax.shard_map(call, mesh=mesh, in_specs=(specs_of(arrays),), out_specs=[P(None, "x"), P()], check_vma=False)
    args = arrays, of.cotangents(arrays)
    assert_close(jax.jit(pullback(f, of.differentiable))(*args), oracle(of, pullback)(*args), 2e-5)


@pytest.mark.slow
def test_the_modules_api_over_a_mesh():
    of = CASES["gla"]
    arrays = {{"gk": "g"}.get(name, name): x for name, x in of.arrays().items()}
    over = dict(mesh=mesh_of(2), in_specs=specs_of(arrays), out_specs=(P(None, "x"), P()), axis_name="x")
    assert_close(list(modules.gla(**arrays, return_state=True, **over)), oracle(of)(of.arrays()), 2e-5)
    with pytest.raises(ValueError, match="axis s of q is sharded over 'x'; it must be whole: give axis_name inside"):
        modules.gla(**arrays, return_state=True, **(over | dict(axis_name=None)))


def test_explain_at_the_same_place():
    _, x = local_call(2)
    asked = []

    def explained(x):
        asked.append(ejkernel.explain("gla", **x, axis_name="x"))
        return x["q"]

    mesh = mesh_of(2, AxisType.Explicit)
    jax.eval_shape(jax.shard_map(explained, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), x)
    assert asked[0].runs


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_an_axis_that_is_not_there():
    x = CASES["gla"].arrays()
    with pytest.raises(
        ValueError, match=r"gla: there is no axis 'x' here; call it inside jax.shard_map over that axis"
    ):
        lax.gla(**x, axis_name="x")
    with pytest.raises(TypeError, match=r"gla: axis_name is 3; it must be the name of a mesh axis, or several"):
        lax.gla(**x, axis_name=3)
