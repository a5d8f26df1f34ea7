"""Where a ring is called: beside other axes, over several, in scripts, in scanned layers, in exported programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import ejkernel
from ejkernel import lax

from .calls import KEPT, LAYOUTS, QKV, STRATEGIES, local_call, mesh_of, random, sines, squares

each_type = pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))


def whole(x):
    return lax.flash_attention(**x, causal=True)


def ring(x, **options):
    """ring_attention of shards of a sequence that is contiguous over the devices."""
    return lax.ring_attention(**x, **dict(axis_name="x", layout="contiguous", strategy="ring", causal=True) | options)


# --- Meshes -----------------------------------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize(
    "manual", (pytest.param({"x", "b"}, marks=pytest.mark.slow), {"x"}), ids=("all_manual", "batch_not")
)
def test_beside_a_batch_that_is_sharded(types, manual):
    """The batch over another axis, Manual or not."""
    x, mesh = random(**QKV), jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    inner = P("b", "x") if "b" in manual else P(None, "x")
    f = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=inner, out_specs=inner, axis_names=manual))
    placed = jax.device_put(x, NamedSharding(mesh, P("b", "x")))
    assert_close(jax.jit(jax.value_and_grad(sines(f)))(placed), jax.value_and_grad(sines(whole))(x), 2e-5)


@each_type
@pytest.mark.parametrize(
    ("strategy", "explicit", "auto"),
    [
        ("all_gather", {"all-gather": 2}, {"collective-permute": 2}),
        ("ulysses", {"all-to-all": 4 * 2}, {"collective-permute": 4}),  # XLA has an array for each device
    ],
    ids=("all_gather", "ulysses"),
)
def test_the_batch_is_not_gathered(strategy, explicit, auto, types):
    """k and v, or q and o as well, are sent over the axis of the sequence, beside another one that splits them.

    With jax 0.10.2 Explicit axes are gathered all the same.
    """
    x, mesh = random(**QKV), jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    of = P(None, "x")
    call = lambda x: ring(x, strategy=strategy)
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=of, out_specs=of, axis_names={"x"}))
    placed = jax.device_put(x, NamedSharding(mesh, P("b", "x")))
    found = collectives(f.lower(placed).compile().as_text())
    assert dict(found) == (explicit if types == AxisType.Explicit else auto)
    assert_close(f(placed), whole(x), 2e-5)


@each_type
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beside_batch_and_heads_that_are_sharded(strategy, types):
    """Gradients of all operands, of sinks and a traced scale too, over a mesh of three axes, one of them Manual."""
    x = random(q=(2, 12, 8, 8), k=(2, 12, 4, 8), v=(2, 12, 4, 8), sinks=(8,), softmax_scale=())
    mesh = jax.make_mesh((2, 2, 2), ("b", "h", "x"), axis_types=(types,) * 3)
    specs = {name: P(None, "x") if name in "qkv" else P() for name in x}
    call = lambda x: ring(x, strategy=strategy)
    f = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P(None, "x"), axis_names={"x"})
    split = {name: P("b", "x", "h") if name in "qkv" else P("h") if name == "sinks" else P() for name in x}
    placed = {name: jax.device_put(a, NamedSharding(mesh, split[name])) for name, a in x.items()}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(sines(f)))(placed)
    assert_close(found, jax.value_and_grad(sines(whole))(x), 2e-5)


def test_a_sequence_over_two_axes():
    types = (AxisType.Auto,) * 2
    x, mesh = random(**QKV), jax.make_mesh((2, 3), ("a", "b"), devices=jax.devices()[:6], axis_types=types)
    call, of = lambda x: ring(x, axis_name=("a", "b"), layout="striped"), P(None, ("a", "b"))
    order, inverse = lax.ring_order(12, 6, "striped")
    found = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=of, out_specs=of))({n: a[:, order] for n, a in x.items()})
    assert_close(found[:, inverse], whole(x), 2e-5)


@each_type
@pytest.mark.parametrize(
    ("across", "within", "layout"),
    [
        (2, 2, "zigzag"),
        *(
            pytest.param(*call, marks=pytest.mark.slow)
            for call in ((3, 2, "zigzag"), (2, 4, "contiguous"), (1, 2, "zigzag"), (2, 1, "zigzag"), (2, 2, "striped"))
        ),
    ],
)
def test_a_ring_across_and_heads_exchanged_within(across, within, layout, types):
    """Gradients of all operands; of striped shards without a mask."""
    x = random(q=(2, 24, 8, 8), k=(2, 24, 4, 8), v=(2, 24, 4, 8), sinks=(8,), softmax_scale=(), bias=(8, 1, 24))
    options = dict(causal=layout != "striped", window=(9, 3) if layout == "contiguous" else None)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (2, 24)), jnp.int32)
    ids = dict(q_segment_ids=ids, kv_segment_ids=ids)
    devices = across * within
    mesh = jax.make_mesh((across, within), ("a", "b"), devices=jax.devices()[:devices], axis_types=(types,) * 2)
    order, inverse = lax.ring_order(24, devices, layout)
    of = P(None, ("a", "b"))
    call = lambda x: ring(x, axis_name=("a", "b"), strategy="usp", layout=layout, **options)
    on_mesh = lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)) if types == AxisType.Explicit else x

    def attention(x):
        specs = {name: of if name in "qkv" or name in ids else P() for name in [*x, *ids]}
        x = {name: a if specs[name] == P() else a[:, order] for name, a in {**x, **ids}.items()}
        x["bias"] = x["bias"][..., order]
        x = {name: on_mesh(a, specs[name]) for name, a in x.items()}
        o = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=of)(x)
        return on_mesh(o, P())[:, inverse]

    wanted = jax.value_and_grad(sines(lambda x: lax.flash_attention(**x, **ids, **options)))(x)
    assert_close(jax.jit(jax.value_and_grad(sines(attention)))(x), wanted, 2e-5)


@pytest.mark.parametrize("strategy", ("ring", pytest.param("all_gather", marks=pytest.mark.slow)))
def test_shard_map_without_check_vma(strategy):
    x, of, call = random(**QKV), P(None, "x"), lambda x: ring(x, strategy=strategy)
    f = jax.shard_map(call, mesh=mesh_of(3), in_specs=of, out_specs=of, check_vma=False)
    assert_close(jax.jit(jax.value_and_grad(sines(f)))(x), jax.value_and_grad(sines(whole))(x), 2e-5)


@each_type
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_check_vma_beside_a_batch_that_is_sharded(strategy, types):
    x, mesh = random(**QKV), jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    of, call = P(None, "x"), lambda x: ring(x, strategy=strategy)
    f = jax.shard_map(call, mesh=mesh, in_specs=of, out_specs=of, axis_names={"x"}, check_vma=False)
    placed = jax.device_put(x, NamedSharding(mesh, P("b", "x")))
    assert_close(jax.jit(jax.value_and_grad(sines(f)))(placed), jax.value_and_grad(sines(whole))(x), 2e-5)


# --- Scripts ----------------------------------------------------------------------------------------------------------

in_script = pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("ring", "contiguous"),
        *(
            pytest.param(strategy, layout, marks=pytest.mark.slow)
            for strategy in STRATEGIES
            for layout in LAYOUTS
            if (strategy, layout) not in (("ring", "contiguous"), ("all_gather", "striped"))
        ),
    ],
)


@each_type
@in_script
@pytest.mark.parametrize("run", (jax.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)), ids=("jit", "eager"))
def test_arrays_from_before_the_mesh(types, strategy, layout, run):
    """As in a script that sets a mesh: with Explicit axes, JAX asks for operands to be sharded.

    Sinks without a mesh are used as they are.
    """
    x, sinks, of = random(**QKV), random(sinks=(4,))["sinks"], P(None, "x")
    order, inverse = lax.ring_order(12, 2, layout)
    call = lambda x: ring(x, sinks=sinks, strategy=strategy, layout=layout)
    with jax.set_mesh(mesh_of(2, types)):

        def attention(x):
            x = {name: a[:, order] for name, a in x.items()}
            x = jax.sharding.reshard(x, of) if types == AxisType.Explicit else x
            o = jax.shard_map(call, in_specs=of, out_specs=of)(x)
            return (jax.sharding.reshard(o, P()) if types == AxisType.Explicit else o)[:, inverse]

        found = run(jax.value_and_grad(sines(attention)))(x)
    wanted = jax.value_and_grad(sines(lambda x: lax.flash_attention(**x, sinks=sinks, causal=True)))(x)
    assert_close(found, wanted, 2e-5)


# --- Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    (KEPT, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, ejkernel.checkpoint_policies.save_kernels))),
    ids=("names", "nothing", "kernels"),
)
def test_layers_that_are_scanned_and_checkpointed(policy):
    x, weights = random(q=(1, 12, 2, 8))["q"], random(w=(3, 8, 24))["w"] / 4

    def model(attention):
        def layer(x, w):
            return x + attention(dict(zip("qkv", jnp.split(x @ w, 3, -1), strict=True))), None

        return lambda x, w: jnp.sin(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0])

    sharded = jax.shard_map(model(ring), mesh=mesh_of(3), in_specs=(P(None, "x"), P()), out_specs=P(None, "x"))
    gradients = lambda f: jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))(x, weights)
    assert_close(gradients(sharded), gradients(model(whole)), 2e-5)


# --- Export -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_ring_is_exported_for_each_platform_by_itself():
    """For a GPU and a TPU too, where `transforms/test_export.py` exports only what is smaller than their tiles."""
    f, x = local_call(2, 128, causal=True, strategy="ring")
    export = lambda *platforms: jax.export.export(
        jax.jit(squares(f)), platforms=platforms, disabled_checks=ejkernel.export_checks()
    )(x)
    with pytest.raises(ejkernel.UnsupportedError, match="export it for one platform at a time"):
        export("cuda", "tpu")
    assert all(export(platform).platforms == (platform,) for platform in ("cuda", "tpu"))


@pytest.mark.slow
def test_export_for_all_platforms_without_a_ring():
    """Where keys are gathered or heads exchanged, no device has its own branch."""
    f, x = local_call(2, 128, causal=True, strategy="ulysses")
    exported = jax.export.export(
        jax.jit(f), platforms=("cpu", "cuda", "tpu"), disabled_checks=ejkernel.export_checks()
    )(x)
    assert exported.nr_devices == 2


def test_a_symbolic_length():
    """The program depends on the length."""
    call = lambda q: lax.ring_attention(q, q, q, axis_name="x", causal=True)
    f = jax.jit(jax.shard_map(call, mesh=mesh_of(2), in_specs=P(None, "x"), out_specs=P(None, "x")))
    q = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 2*s, 2, 8"), jnp.float32)
    with pytest.raises(ValueError, match=r"^ring_attention: the length of q is symbolic, .*; it has to be known"):
        jax.export.export(f)(q)
