"""Numbers do not depend on meshes: arrays without a mesh, shards of unequal size, several meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    DIFFERENTIABLE,
    assert_close,
    each_by_kind,
    first_of_each,
    gradient,
    oracle,
    tangent,
    with_primitives,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives
from sharded import (
    BATCH,
    both,
    call_of,
    each_call,
    each_type,
    mesh_of,
    needed,
    placed,
    rest,
)

import ejkernel

TRANSFORMS = {"eval": None, "grad": gradient, "jvp": tangent}
OURS = with_primitives(CASES)
LOCAL = [case for case in OURS if case.local]
each_transform_of_each = each_call(OURS, TRANSFORMS)
each_operation_and_transform = each_call(first_of_each(OURS), {"eval": None, "grad": gradient})


# --- Arrays that were made before the mesh ----------------------------------------------------------------------------


@each_transform_of_each
@each_type
def test_arrays_from_before_the_mesh(case, types, transform):
    """They are replicated, and every device computes the whole."""
    f, args = call_of(case, transform)
    with jax.set_mesh(mesh_of(types)):
        compiled = jax.jit(f, keep_unused=True).lower(*args).compile()
        found = compiled(*args)
    assert_close(found, oracle(case, transform)(*args))
    assert not collectives(compiled.as_text())


@each_by_kind(first_of_each(with_primitives(DIFFERENTIABLE)))
@each_type
def test_arrays_from_before_the_mesh_without_jit(case, types):
    f, args = call_of(case, gradient)
    with jax.set_mesh(mesh_of(types)):
        found = f(*args)
    assert_close(found, oracle(case, gradient)(*args))


@each_operation_and_transform
def test_arrays_from_before_an_explicit_mesh_on_tpu(case, transform):
    """There no kernel can be partitioned, and none has to be."""
    f, args = call_of(case, transform)
    with jax.set_mesh(mesh_of()):
        lowered = jax.jit(f, keep_unused=True).trace(*args).lower(lowering_platforms=("tpu",))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


@each_operation_and_transform
def test_auto_axes_of_a_tpu_are_left_to_xla(case, transform):
    """The TPU compiler has no custom partitioning, and XLA implementations do not need it."""
    f, args = call_of(case, transform, lambda arrays: case.call(arrays, config={"platform": "xla"}))
    args = placed(case, args, both(case), mesh_of(AxisType.Auto))
    lowered = jax.jit(f, keep_unused=True).trace(*args).lower(lowering_platforms=("tpu",))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


# --- Parts of unequal size --------------------------------------------------------------------------------------------


def odd(case):
    """The case with sizes without even factors."""
    repeat = case.sizes.get("h", 1) // case.sizes.get("g", 1)
    sizes = dict(b=5, g=3, h=3 * repeat, d=7, n=7)
    of_split = {letter: sizes[letter] for letter in case.split if case.sizes.get(letter, 1) > 1}
    pairs = {letter: 2 * of_split[with_it] for letter, with_it in case.split_with.items() if with_it in of_split}
    return case.resized(of_split | pairs)


@each_transform_of_each
def test_auto_parts_of_unequal_size(case, transform):
    """XLA pads them; a kernel must not see the padding."""
    case, mesh = odd(case), mesh_of(AxisType.Auto, shape=(2, 4))
    for split in (BATCH, rest(case), both(case)):
        place = {name: NamedSharding(mesh, spec) for name, spec in case.specs(split).items()}
        call = lambda arrays, place=place: case.call(
            {name: jax.lax.with_sharding_constraint(x, place[name]) for name, x in arrays.items()}
        )
        f, args = call_of(case, transform, call)
        assert_close(jax.jit(f)(*args), oracle(case, transform)(*args), what=f"{split}: ")


# --- Several meshes ---------------------------------------------------------------------------------------------------


@each_call(LOCAL, TRANSFORMS)
@pytest.mark.parametrize("shape", ((1, 1), (4, 2)), ids=("one device", "eight devices"))
@pytest.mark.parametrize("check_vma", (True, False), ids=("checked", "unchecked"))
def test_shard_map_over_another_mesh(case, transform, shape, check_vma):
    """The operands are on a mesh with three axes, and `shard_map` is over one with two, on the same devices."""
    devices = np.array(jax.devices()[: shape[0] * shape[1]])
    outer, inner = (
        Mesh(devices.reshape(shape[0], 1, shape[1]), ("x", "e", "y")),
        Mesh(devices.reshape(shape), ("x", "y")),
    )
    specs, results = case.specs(both(case)), case.result_specs(both(case))
    part = jax.shard_map(case.call, mesh=inner, in_specs=(specs,), out_specs=results, check_vma=check_vma)
    on = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(outer, spec))
    f, args = call_of(case, transform, lambda arrays: [on(x, of) for x, of in zip(part(arrays), results, strict=True)])
    arrays = {name: jax.device_put(x, NamedSharding(outer, specs[name])) for name, x in args[0].items()}
    compiled = jax.jit(f, keep_unused=True).lower(arrays, *args[1:]).compile()
    assert_close(compiled(arrays, *args[1:]), oracle(case, transform)(*args))
    if shape != (1, 1) and (check_vma or transform is not gradient):  # else JAX sums over the axes that no spec names
        wanted = needed(case, both(case), gradient if transform is gradient else None)
        assert collectives(compiled.as_text()) == wanted


# --- Outside `jit` ----------------------------------------------------------------------------------------------------


@each_by_kind(first_of_each(OURS))
def test_one_explicit_operand_and_others_of_no_mesh(case):
    """Each device takes its shard of the others in every transform, though no `jit` and no context names devices."""
    mesh, first = mesh_of(), next(iter(case.operands))
    spec = {"b": "x"} if "b" in case.operands[first].axes.split() else {}
    for transform in TRANSFORMS.values() if case.differentiable else (None,):
        f, (arrays, *others) = call_of(case, transform)
        place = NamedSharding(mesh, case.specs(spec)[first])
        of = {name: jax.device_put(x, place) if name == first else np.asarray(x) for name, x in arrays.items()}
        results = [NamedSharding(mesh, result) for result in case.result_specs(spec)]
        if transform is gradient:
            others = [jax.device_put(others[0], results)]
        elif transform is tangent:
            others = [{name: jax.device_put(x, place) if name == first else x for name, x in others[0].items()}]
        assert_close(f(of, *others), oracle(case, transform)(*call_of(case, transform)[1]))


# --- Dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_in_a_shard_map_of_ones_own():
    """On each device batch and heads count from 0, so all drop the same, unless the key depends on the device."""
    x, key = jnp.ones((4, 8, 1, 8)), jax.random.key(0)

    def call(x, key, folded):
        key = jax.random.fold_in(key, jax.lax.axis_index("x")) if folded else key
        return ejkernel.lax.flash_attention(x, x, x, dropout_rate=0.5, dropout_key=key)

    over = lambda folded: jax.jit(
        jax.shard_map(
            partial(call, folded=folded), mesh=mesh_of(AxisType.Auto), in_specs=(P("x"), P()), out_specs=P("x")
        )
    )
    alike, own = over(False)(x, key), over(True)(x, key)
    assert all(np.array_equal(alike[0], part) for part in alike[1:])
    assert not any(np.array_equal(own[0], part) for part in own[1:])


# --- vmap over Explicit axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", (2, 3))
def test_mapped_queries_of_heads_that_share_one(examples):
    """The heads stay where they are: results have the type of the queries, and nothing is communicated."""
    mesh = jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    check_mapped(mesh, examples, P(None, None, None, "y"))


def test_a_mapped_axis_of_one_example_on_one_device():
    mesh = jax.make_mesh((1,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    check_mapped(mesh, 1, P("y"))


def test_a_mapped_axis_beside_a_batch_on_other_devices():
    """Results are split along both, as the queries are, and stay where they are; with a scale of each example, too."""
    rng = np.random.default_rng(0)
    loss = lambda q, k, scale: jnp.sin(ejkernel.lax.flash_attention(q, k, k, softmax_scale=scale)).sum()
    for shape, examples, batch in (((2, 4), 4, 8), ((2, 1), 2, 1), ((1, 2), 1, 2)):
        mesh = mesh_of(shape=shape)
        put = lambda x, *spec, mesh=mesh: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        q, k = (rng.standard_normal((examples, batch, 6, 2, 8)).astype(np.float32) for _ in range(2))
        scale = np.linspace(0.1, 0.3, examples, dtype=np.float32)
        attend = jax.vmap(lambda q, k, scale: ejkernel.lax.flash_attention(q, k, k, softmax_scale=scale), (0, None, 0))
        gradients = jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0))
        for call in (attend, gradients):
            args = put(q, "x", "y"), put(k[0], "y"), put(scale, "x")
            found = jax.jit(call)(*args)
            assert_close(found, jax.jit(call)(q, k[0], scale))
            assert jax.typeof(jax.tree.leaves(found)[0]) == jax.typeof(args[0])
            program = jax.jit(call).lower(*args).compile().as_text()
            assert "all-gather" not in program and "all-to-all" not in program


def check_mapped(mesh, examples, spec):
    """Attention with examples of queries, and its gradients by queries and by the keys and values that they share."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in ((examples, 2, 6, 4, 8), (2, 6, 1, 8)))
    attend = lambda q, k: ejkernel.lax.flash_attention(q, k, k, causal=True)
    loss = lambda q, k: (attend(q, k) ** 2).sum()
    of_q, of_k = (jax.vmap(f, (0, None)) for f in (attend, jax.grad(loss, (0, 1))))
    wanted = of_q(q, k), of_k(q, k)
    with jax.set_mesh(mesh):
        split, whole = jax.device_put(q, NamedSharding(mesh, spec)), jax.device_put(k, NamedSharding(mesh, P()))
        found = of_q(split, whole), of_k(split, whole)
        assert jax.typeof(found[0]) == jax.typeof(found[1][0]) == jax.typeof(split)
        assert not collectives(jax.jit(of_q).lower(split, whole).compile().as_text())
    assert_close(jax.tree.map(np.asarray, found), wanted)


# --- Axes of which one has several things for a head or a group -------------------------------------------------------


def paged(groups, devices):
    """A call of ragged_page_attention_v3 over so many key/value heads, with the pool split over a mesh axis."""
    mesh = jax.make_mesh((devices,), ("y",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])
    pool = jax.device_put(np.ones((4, 4, 2 * groups, 8), np.float32), NamedSharding(mesh, P(None, None, "y")))
    q, kv = (np.ones((3, heads, 8), np.float32) for heads in (4, groups))
    tables = dict(context_lens=np.array([3]), block_tables=np.array([[2]]), query_start_loc=np.array([0, 3]))
    return dict(q=q, kv_pages=pool) | tables | dict(num_seqs=1), dict(k=kv, v=kv)


def test_a_pool_of_fewer_heads_than_devices():
    """Keys and values of a head are neighbours on one axis: four devices divide it, but not its two heads."""
    for groups, devices in ((2, 4), (1, 2)):
        call, new = paged(groups, devices)
        for operation, given in (
            (ejkernel.lax.ragged_page_attention, {}),
            (ejkernel.lax.ragged_page_attention_v3, new),
        ):
            with pytest.raises(ValueError, match=f"{groups} key/value heads cannot be sharded over the {devices} dev"):
                operation(**call, **given)


def test_a_pool_of_one_head_on_one_device():
    """The axis is split over a mesh axis of one device, and the pool keeps its type, as the carry of a scan has to."""
    call, new = paged(1, 1)
    step = lambda pool, _: ejkernel.lax.ragged_page_attention_v3(**call | new | dict(kv_pages=pool))[::-1]
    pool, o = jax.lax.scan(step, call["kv_pages"], length=2)
    assert jax.typeof(pool) == jax.typeof(call["kv_pages"])
    np.testing.assert_allclose(o, np.ones((2, 3, 4, 8)), rtol=1e-6)
    np.testing.assert_allclose(ejkernel.lax.ragged_page_attention(**call), o[0], rtol=1e-6)


def test_groups_of_codes_that_devices_do_not_divide():
    mesh = mesh_of(shape=(4, 2))
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "y")))
    x, codes, scales = np.ones((4, 96), np.float32), np.zeros((96, 12), np.uint32), np.ones((96, 3), np.float32)
    product = partial(ejkernel.lax.quantized_matmul, mode="nf4", group_size=32)
    for name, call in {
        "w": lambda: product(x, split(codes), scales),
        "x": lambda: product(split(x), codes, scales, transpose=True),
    }.items():
        with pytest.raises(ValueError, match=f"quantized_matmul: 3 groups of {name} cannot be sharded over the 2 dev"):
            call()
