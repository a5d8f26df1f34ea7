"""A linear recurrence over a sequence that is sharded over devices is that over the whole, through every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, curvature, curvature_by_reverse, oracle, pullback, tangent
from cases._case import Operand
from cases._recurrence import PACKED, case, gate, remembering
from cases.flash_attention import scalar
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel
from ejkernel import lax, modules
from ejkernel.modules.operations import _sequence_shards

SIZES = dict(b=2, s=24, h=4, g=2, d=8, e=16)
OF_THE_WHOLE = ("g_gamma", "initial_state", "cu_seqlens", "softmax_scale")
GATES = dict(g=gate("b s h"), gk=gate("b s h d"), gv=gate("b s h e"), g_gamma=gate("h"))
OF_PACKED = {name: Operand(x.axes.replace("b s", "1 s"), x.values) for name, x in GATES.items()}


def cuts(rng, shape):
    """Tokens before the first sequence and after the last, empty sequences, and one over most of the devices."""
    return np.array([1, 3, 3, 17, 17, 20, 23], np.int32)


def packed(name, gates, **options):
    operands = {n: x for n, x in OF_PACKED.items() if n in gates}
    operands |= dict(initial_state="n h d e", cu_seqlens=Operand("m", cuts))
    return case("recurrent", name, operands, SIZES | dict(n=6, m=7), of=PACKED, return_state=True, **options)


CASES = {
    "gla": case("gla", "gla", dict(gk=GATES["gk"], initial_state="b h d e"), SIZES, return_state=True),
    "lightning": case(
        "lightning_attention", "lightning", {}, SIZES, return_state=True, layer_idx=0, num_layers=2, reverse=True
    ),
    "every_decay": case(
        "recurrent",
        "every_decay",
        GATES | dict(initial_state="b h d e", softmax_scale=Operand("", scalar)),
        SIZES,
        return_state=True,
    ),
    "no_decay": case("recurrent", "no_decay", {}, SIZES),
    "packed": packed("packed", ("g", "gk", "g_gamma")),
    "packed_reversed": packed("packed_reversed", ("gk", "gv"), reverse=True),
}


def mesh_of(size, types=AxisType.Auto):
    return jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(types,))


def specs_of(arrays):
    return {name: P() if name in OF_THE_WHOLE else P(None, "x") for name in arrays}


def sharded(of, size, types=AxisType.Auto):
    """Arrays of the whole sequence → the results of the whole sequence, computed over that many devices."""

    def run(arrays):
        specs, mesh = specs_of(arrays), mesh_of(size, types)
        results = [P(None, "x"), P()][: len(of.results)]
        call = lambda x: of.call(x, axis_name="x")
        if types == AxisType.Explicit:
            arrays = {name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        found = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=results)(arrays)
        return (
            [jax.sharding.reshard(x, NamedSharding(mesh, P())) for x in found] if types == AxisType.Explicit else found
        )

    return run


def check(of, size, transform=pullback, types=AxisType.Auto):
    """Results and gradients, or another transform, against the formula in float64."""
    arrays = of.arrays()
    cotangents, tangents = of.cotangents(arrays), of.tangents()
    args = {pullback: (arrays, cotangents), tangent: (arrays, tangents)}.get(transform, (arrays, cotangents, tangents))
    found = jax.jit(transform(sharded(of, size, types), of.differentiable))(*args)
    assert_close(found, oracle(of, transform)(*args), 1e-4 if len(args) == 3 else 2e-5, f"{of} {size}")


CORE = {("packed", 3)}
DEFAULT = {("gla", 2), ("lightning", 4), ("every_decay", 3)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(*call, marks=[pytest.mark.core] if call in CORE else [] if call in DEFAULT else [pytest.mark.slow])
        for name in CASES
        for size in (1, 2, 3, 4, 8)
        for call in [(name, size)]
    ],
)
def test_results_and_gradients(name, size):
    check(CASES[name], size)


@pytest.mark.parametrize("reverse", (False, True))
def test_any_cuts(reverse):
    """Sequences that begin and end anywhere, at the ends of shards too, empty ones, and tokens of none."""
    of = packed("any_cuts", ("gk",), reverse=reverse)
    arrays, rng = of.arrays(), np.random.default_rng(0)
    whole, found = jax.jit(of.call), jax.jit(sharded(of, 4))
    for _ in range(60):
        places = rng.choice([0, 6, 12, 18, 24, *rng.integers(0, 25, 5)], 7)
        arrays |= dict(cu_seqlens=jnp.asarray(np.sort(places), jnp.int32))
        assert_close(found(arrays), whole(arrays), 2e-5, str(arrays["cu_seqlens"]))


def test_a_shard_of_several_chunks_and_blocks(monkeypatch):
    """Eight tokens in three chunks of two blocks each, the last of which are not full."""
    monkeypatch.setattr(_sequence_shards, "_CHUNK", 3)
    monkeypatch.setattr(_sequence_shards, "_BLOCK", 2)
    check(CASES["packed_reversed"], 3)


@pytest.mark.parametrize(
    ("name", "size"),
    [("packed", 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("every_decay", 3), ("packed_reversed", 8)))],
)
def test_tangents(name, size):
    check(CASES[name], size, tangent)


TINY = dict(b=1, s=4, h=2, g=1, d=2, e=2)
SECOND = case("gla", "second", dict(gk=gate("b s h d"), initial_state="b h d e"), TINY, return_state=True)


@pytest.mark.parametrize("transform", [curvature, pytest.param(curvature_by_reverse, marks=pytest.mark.slow)])
def test_second_order(transform):
    check(SECOND, 2, transform)


def test_explicit_axes_outside():
    check(CASES["gla"], 2, types=AxisType.Explicit)


# --- Precision and what belongs to no sequence ------------------------------------------------------------------------


def long(tokens, **sizes):
    """A call of gla whose state is kept for about so many tokens."""
    gates = dict(gk=Operand("b s h d", remembering(tokens)))
    return case("gla", f"kept_for_{tokens:g}", gates, sizes, return_state=True)


def check_precision(of, size):
    """In bfloat16 it errs at most twice as much as the formula, and three times in gradients."""
    arrays = of.arrays(dtype=jnp.bfloat16)
    args = arrays, of.cotangents(arrays)
    run = lambda f: jax.jit(pullback(f, of.differentiable))(*args)
    found, formula, exact = run(sharded(of, size)), run(of.formula), oracle(of, pullback)(*args)
    for factor, x, y, z in zip((2, 3), found, formula, exact, strict=True):
        for a, b, c in zip(*map(jax.tree.leaves, (x, y, z)), strict=True):
            distance = lambda a, c=c: np.linalg.norm(np.asarray(a, np.float64) - c)
            assert distance(a) <= factor * max(distance(b), distance(jnp.asarray(c, a.dtype)))


@pytest.mark.parametrize("tokens", (30, pytest.param(1e6, marks=pytest.mark.slow)))
def test_bfloat16_errs_as_the_formula_does(tokens):
    check_precision(long(tokens, b=1, s=96, h=2, g=1, d=16, e=16), 4)


def test_tokens_of_no_sequence_may_hold_nan():
    """They enter neither results nor gradients of any device."""
    of = CASES["packed"]
    clean = of.arrays()
    token = np.arange(SIZES["s"])
    outside = (token < 1) | (token >= 23)
    of_tokens = [name for name in clean if name not in OF_THE_WHOLE]
    fill = lambda x, value: jnp.where(outside.reshape(1, -1, *[1] * (x.ndim - 2)), value, x)
    filled = lambda value: clean | {name: fill(clean[name], value) for name in of_tokens}
    f, cotangents = jax.jit(pullback(sharded(of, 3), of.differentiable)), of.cotangents(clean)
    assert_close(f(filled(np.nan), cotangents), jax.tree.map(np.asarray, f(filled(1.0), cotangents)), 1e-6)


# --- Programs ---------------------------------------------------------------------------------------------------------


def local_call(size, length=64, **options):
    """gla on sharded arrays, and their types."""
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
    """States are gathered once, and their gradients scattered once; the final state is one all-reduce more."""
    f, x = local_call(8)
    assert collectives(compiled(f, x).as_text()) == {"all-gather": 1}
    assert collectives(compiled(squares(f), x).as_text()) == {"all-gather": 1, "reduce-scatter": 1}
    mesh = mesh_of(8, AxisType.Explicit)
    call = lambda x: lax.gla(**x, axis_name="x", return_state=True)
    with_state = jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=(P(None, "x"), P()))
    assert collectives(compiled(with_state, x).as_text()) == {"all-gather": 1, "all-reduce": 1}


def test_the_recurrence_itself_runs_once():
    f, x = local_call(2)
    assert [e.primitive.name for e in equations(jax.make_jaxpr(f)(x), "gla")] == ["gla"]
    assert [e.primitive.name for e in equations(jax.make_jaxpr(squares(f))(x), "gla")] == ["gla", "gla_bwd"]


def test_the_memory_of_a_gradient_is_that_of_a_shard():
    """Over twice the devices, twice the tokens take a device no more; and half of the tokens half as much."""

    def temporary(size, length):
        f, x = local_call(size, length)
        return compiled(squares(f), x).memory_analysis().temp_size_in_bytes

    assert temporary(8, 1024) < 1.1 * temporary(4, 1024)
    assert temporary(4, 512) < 0.6 * temporary(4, 1024)


# --- Within other programs --------------------------------------------------------------------------------------------


def of_sines(f):
    return lambda x: sum(jnp.sin(y * 3).sum() for y in f(x))


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
@pytest.mark.parametrize("manual", ({"x", "b"}, {"x"}), ids=("all_manual", "rest_not"))
def test_beside_heads_that_are_sharded(types, manual):
    """The heads over another axis, manual or not."""
    of, mesh = CASES["gla"], jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    x = of.arrays()
    specs = {name: P(None, "b") if name == "initial_state" else P(None, "x", "b") for name in x}
    only_manual = lambda spec: P(*(axis if axis in manual else None for axis in spec))
    inner = {name: only_manual(spec) for name, spec in specs.items()}
    results = [only_manual(P(None, "x", "b")), only_manual(P(None, "b"))]
    call = lambda x: of.call(x, axis_name="x")
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(inner,), out_specs=results, axis_names=manual))
    x = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in x.items()}
    loss = of_sines(f)
    wanted = jax.value_and_grad(of_sines(of.call))(of.arrays())
    assert_close(jax.jit(jax.value_and_grad(loss))(x), wanted, 2e-5)


def test_explicit_heads_without_a_state():
    """The state of 0 in which a sequence begins is sharded as heads are."""
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
    """A mapped axis outside and one within shard_map, and a checkpoint around the layer."""
    of = CASES["gla"]
    stacked = {name: jnp.stack([x, x[::-1]]) for name, x in of.arrays().items()}
    layer = jax.checkpoint(sharded(of, 2))
    found = jax.jit(jax.value_and_grad(of_sines(jax.vmap(layer))))(stacked)
    assert_close(found, jax.value_and_grad(of_sines(jax.vmap(of.call)))(stacked), 2e-5)
    specs = {name: P(None, *spec) for name, spec in specs_of(stacked).items()}
    within = jax.vmap(lambda x: of.call(x, axis_name="x"))
    within = jax.shard_map(within, mesh=mesh_of(2), in_specs=(specs,), out_specs=[P(None, None, "x"), P()])
    assert_close(jax.jit(within)(stacked), jax.vmap(of.call)(stacked), 2e-5)


def test_without_a_check_of_what_varies():
    of = CASES["gla"]
    arrays, mesh = of.arrays(), mesh_of(2)
    call = lambda x: of.call(x, axis_name="x")
    f = jax.shard_map(call, mesh=mesh, in_specs=(specs_of(arrays),), out_specs=[P(None, "x"), P()], check_vma=False)
    args = arrays, of.cotangents(arrays)
    assert_close(jax.jit(pullback(f, of.differentiable))(*args), oracle(of, pullback)(*args), 2e-5)


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
