"""The modules API on a mesh gives the numbers of the whole call; errors for specs that fit no array or axis."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, each, each_by_kind, first_of_each, with_primitives
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import both, each_type, mesh_of, rest

import ejkernel
from ejkernel.modules import FlashAttention
from ejkernel.modules._operation import OPERATIONS
from ejkernel.ops import ConfigSelectorChain, Executor

CASES = with_primitives(cases.CASES)


def call(x, in_specs, **arrays):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return ejkernel.modules.mean_pooling(x, **arrays, mesh=mesh, in_specs=in_specs, out_specs=P("x"))


@pytest.mark.parametrize("in_specs", ((P("x"),), [P("x")], {"x": P("x")}), ids=("tuple", "list", "mapping"))
@pytest.mark.parametrize("made", (np.asarray, jax.numpy.asarray))
def test_arrays_are_split(made, in_specs):
    """NumPy arrays too."""
    x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    np.testing.assert_allclose(call(made(x), in_specs), x.mean(1))


@pytest.mark.parametrize(
    "in_specs, error, says",
    (
        ((P("x"), P()), ValueError, "in_specs has 2 specs for 1 arrays: x (x: f32[4,3,2])"),
        ({"y": P("x")}, ValueError, "in_specs names y, which is no array of this call"),
        (P("x"), TypeError, f"in_specs is {P('x')!r}; it must be a mapping by name or a tuple"),
    ),
    ids=("too many", "unknown", "no tuple"),
)
def test_specs_of_no_array(in_specs, error, says):
    with pytest.raises(error) as raised:
        call(np.zeros((4, 3, 2), np.float32), in_specs)
    assert str(raised.value) == f"mean_pooling: {says}"


@pytest.mark.parametrize(
    "spec, says",
    (
        (P(None, "x"), "axis 1 of x is split over 2 devices; its size 3 is no multiple of that"),
        (P(None, None, None, "x"), f"the spec of x has 4 axes: {P(None, None, None, ('x',))}"),
    ),
    ids=("uneven", "too many axes"),
)
def test_specs_that_do_not_fit_an_array(spec, says):
    with pytest.raises(ValueError) as raised:
        call(np.zeros((4, 3, 2), np.float32), {"x": spec})
    assert str(raised.value) == f"mean_pooling: {says} (x: f32[4,3,2])"


def test_an_operand_of_another_name_in_the_modules_api():
    """The gate gk of the lax API is g in the modules API."""
    x, mesh = jnp.ones((1, 8, 2, 4)), jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    heads = P(None, None, "x")
    with pytest.raises(ValueError, match="gla: axis 2 of g is split over 2 devices; its size 3 "):
        ejkernel.modules.gla(x, x, x, jnp.ones((1, 8, 3, 4)), mesh=mesh, in_specs=(heads,) * 4, out_specs=heads)


def over_heads(call, q, **given):
    mesh, heads = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P(None, None, "x")
    return call(q, q, q, **{"mesh": mesh, "in_specs": dict.fromkeys("qkv", heads), "out_specs": heads} | given)


def test_the_class_and_an_executor_take_a_mesh():
    """As the function does, with the configs that the executor chooses."""
    q, asked = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 2, 4)), jnp.float32), []
    chain = ConfigSelectorChain(autotune=False, on_event=lambda event, operation, *_: asked.append(operation))
    wanted = ejkernel.lax.flash_attention(q, q, q)
    for call in (FlashAttention(), functools.partial(Executor(chain), FlashAttention())):
        found = over_heads(call, q)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert len(found.sharding.device_set) == 2
        with pytest.raises(ValueError, match="flash_attention: in_specs and out_specs are given without a mesh"):
            over_heads(call, q, mesh=None)
        with pytest.raises(ValueError, match="flash_attention: a mesh is given without in_specs and out_specs"):
            over_heads(call, q, out_specs=None)
    assert asked == ["flash_attention@v1"]


# --- Every operation --------------------------------------------------------------------------------------------------


def call_of(case, arrays=None, **mesh):
    """The results of a case with the argument names of modules, with a seed where it takes a key."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    arrays = {name: 7 if is_key(x) else x for name, x in (arrays or case.arrays()).items()}
    named = renamed(case, arrays | dict(case.options))
    return jax.tree.leaves(getattr(ejkernel.modules, case.operation)(**named, **mesh))


def renamed(case, arguments):
    names = OPERATIONS[case.operation].renamed
    return {names.get(name, name): x for name, x in arguments.items()}


def over(mesh, case, split, results=None, **specs):
    """The same over a mesh whose axes split the letters; some specs can be replaced."""
    of = {name: spec for name, spec in (case.specs(split) | specs).items() if name != "dropout_key"}
    results = tuple(results or case.result_specs(split))
    out_specs = results if len(results) > 1 else results[0]
    return lambda arrays=None: call_of(case, arrays, mesh=mesh, in_specs=renamed(case, of), out_specs=out_specs)


@functools.cache
def whole(case):
    """The results of a case without a mesh."""
    return jax.jit(lambda arrays: call_of(case, arrays))(case.arrays())


def letters_of_whole_axes(case):
    letters = {letter for x in case.operands.values() for letter in x.axes.split() if letter.isalpha()}
    return sorted(letters.difference(case.algorithm.forward.layout.split, case.split_with))


# A result that replaces a shared operand is no result.
@each_by_kind([case for case in CASES if case.local or case.differentiable], rest=(pytest.mark.slow,))
@each_type
def test_the_numbers_are_those_of_the_whole(case, types):
    """Dropout and decays per head too, which depend on what other devices hold."""
    assert_close(jax.jit(over(mesh_of(types), case, both(case)))(case.arrays()), whole(case))


@each_by_kind([case for case in first_of_each(CASES) if case.differentiable])
def test_the_gradient_is_that_of_the_whole(case):
    arrays = case.arrays()
    moving = {name: arrays[name] for name in case.differentiable}
    loss = lambda call: lambda of: sum((x**2).sum() for x in call(arrays | of))
    found = jax.jit(jax.grad(loss(over(mesh_of(AxisType.Auto), case, both(case)))))(moving)
    assert_close(found, jax.grad(loss(lambda of: call_of(case, of)))(moving))


@each_by_kind(CASES)
@each_type
def test_an_axis_that_must_be_whole(case, types):
    """A device would take its shard for the whole axis."""
    for letter in letters_of_whole_axes(case):
        if case.sizes[letter] % 2 == 0:
            with pytest.raises(ValueError) as error:
                over(mesh_of(types), case, {letter: "y"})()
            assert f"over 'y'; it must be whole: {case.algorithm.forward.layout.advice}" in str(error.value)


@each_by_kind(first_of_each(CASES))
def test_an_axis_that_must_be_whole_over_one_device(case):
    """Then the axis is whole."""
    mesh, results = mesh_of(AxisType.Auto, shape=(4, 1)), [P("y") for _ in case.results]
    calls = {letter: over(mesh, case, {letter: "y"}, results) for letter in letters_of_whole_axes(case)}
    found = jax.jit(lambda arrays: {letter: call(arrays) for letter, call in calls.items()})(case.arrays())
    for letter, of in found.items():
        assert_close(of, whole(case), what=f"{letter} over a device: ")


@each([case for case in CASES if case.sizes.get("g", 1) > 1], first=(), rest=(pytest.mark.slow,))
def test_key_value_heads_go_with_the_query_heads(case):
    """They are split even if only the query's spec says so, or a query would read another head's keys."""
    unsplit = {name: P() for name in ("k", "v", "kv_pages") if name in case.operands}
    assert_close(jax.jit(over(mesh_of(AxisType.Auto), case, rest(case), **unsplit))(case.arrays()), whole(case))
