"""Attention over a sequence that is sharded over devices is that over the whole sequence, through every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, curvature, curvature_by_reverse, oracle, pullback, tangent
from cases.flash_attention import FAMILIES, Operand, case, chance, key, scalar, segments
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel
from ejkernel import lax, modules

LAYOUTS = ("contiguous", "striped", "zigzag")
STRATEGIES = ("ring", "all_gather", "ulysses")
SIZES = dict(b=2, s=24, t=24, e=4)
CASES = {
    "causal": case("causal", SIZES, causal=True, return_lse=True),
    "full": case("full", SIZES, return_lse=True),
    "window": case("window", dict(SIZES, n=2), dict(sinks="h n"), window=(7, 3), softcap=2.0, return_lse=True),
    "pairs": case(
        "pairs", SIZES, dict(bias="h s t", mask=Operand("b 1 s t", chance(0.7))), causal=True, return_lse=True
    ),
    "rows": case(
        "rows",
        SIZES,
        dict(bias="s 1", mask=Operand("t", lambda rng, shape: rng.random(shape) < 0.7)),
        window=(None, 2),
        return_lse=True,
    ),
    "segments": case(
        "segments",
        SIZES,
        dict(q_segment_ids=Operand("b s", segments), kv_segment_ids=Operand("b t", segments), sinks="h"),
        causal=True,
        return_lse=True,
    ),
    "cross": case(
        "cross", dict(SIZES, t=48), dict(softmax_scale=Operand("", scalar)), causal=True, window=9, return_lse=True
    ),
    "fewer_keys": case("fewer_keys", dict(SIZES, s=48), causal=True, window=(30, 0), return_lse=True),
    "dropout": case(
        "dropout",
        SIZES,
        dict(dropout_key=Operand("", key)),
        local=False,
        causal=True,
        dropout_rate=0.3,
        return_lse=True,
    ),
}


def mesh_of(size, types=AxisType.Auto):
    return jax.make_mesh((size,), ("x",), devices=jax.devices()[:size], axis_types=(types,))


def spec_of(name, x):
    """How an operand is split: the tokens of queries and keys, the rows of bias and mask."""
    if name in ("bias", "mask"):
        return P(*["x" if axis == x.ndim - 2 and n > 1 else None for axis, n in enumerate(x.shape)])
    return P(None, "x") if name in ("q", "k", "v", "q_segment_ids", "kv_segment_ids") else P()


def laid_out(arrays, size, layout):
    """The arrays of a whole sequence in the order in which they are sharded."""
    of_queries, of_keys = (lax.ring_order(arrays[name].shape[1], size, layout)[0] for name in "qk")

    def reordered(name, x):
        if name in ("bias", "mask"):
            x = x[..., of_keys] if x.shape[-1] > 1 else x
            return x[..., of_queries, :] if x.ndim > 1 and x.shape[-2] > 1 else x
        orders = dict(q=of_queries, k=of_keys, v=of_keys, q_segment_ids=of_queries, kv_segment_ids=of_keys)
        return x[:, orders[name]] if name in orders else x

    return {name: reordered(name, x) for name, x in arrays.items()}


def ringed(size, layout, strategy="ring", types=AxisType.Auto, **options):
    """Arrays of the whole sequence → [o, lse] of the whole sequence, over that many devices."""

    def run(arrays):
        inverse = lax.ring_order(arrays["q"].shape[1], size, layout)[1]
        call = lambda x: lax.ring_attention(**x, axis_name="x", layout=layout, strategy=strategy, **options)
        arrays = laid_out(arrays, size, layout)
        specs, results = {n: spec_of(n, x) for n, x in arrays.items()}, (P(None, "x"), P(None, None, "x"))
        mesh = mesh_of(size, types)
        if types == AxisType.Explicit:
            arrays = {name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        o, lse = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=results)(arrays)
        if types == AxisType.Explicit:
            o, lse = (jax.sharding.reshard(x, NamedSharding(mesh, P())) for x in (o, lse))
        return [o[:, inverse], lse[:, :, inverse]]

    return run


def check(name, size, layout, strategy, transform=pullback):
    """Results and gradients, or another transform, against the formula in float64."""
    of = CASES[name]
    arrays = of.arrays()
    cotangents, tangents = of.cotangents(arrays), of.tangents()
    args = {pullback: (arrays, cotangents), tangent: (arrays, tangents)}.get(transform, (arrays, cotangents, tangents))
    found = jax.jit(transform(ringed(size, layout, strategy, **of.options), of.differentiable))(*args)
    assert_close(found, oracle(of, transform)(*args), 1e-4 if len(args) == 3 else 2e-5, f"{name} {size} {layout}")


def takes(name, size, layout, strategy):
    """Whether a strategy takes a call; `test_refusals` asks for the reasons."""
    if strategy == "ulysses":
        return size <= 2 and name not in ("pairs", "rows")
    return name != "dropout" and (strategy != "all_gather" or layout != "striped" or name == "full")


CORE = {("causal", 2, "zigzag", "ring"), ("segments", 3, "striped", "ring"), ("causal", 2, "zigzag", "all_gather")}
DEFAULT = {
    ("window", 3, "zigzag", "ring"),
    ("pairs", 2, "contiguous", "ring"),
    ("cross", 3, "contiguous", "ring"),
    ("window", 3, "zigzag", "all_gather"),
    ("segments", 2, "striped", "ulysses"),
    ("dropout", 2, "zigzag", "ulysses"),
}
CALLS = [
    pytest.param(*call, marks=[pytest.mark.core] if call in CORE else [] if call in DEFAULT else [pytest.mark.slow])
    for name in CASES
    for strategy in STRATEGIES
    for layout in LAYOUTS
    for size in (2, 3, 4)
    for call in [(name, size, layout, strategy)]
    if takes(*call)
]


@pytest.mark.parametrize(("name", "size", "layout", "strategy"), CALLS)
def test_results_and_gradients(name, size, layout, strategy):
    check(name, size, layout, strategy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device(layout):
    check("dropout", 1, layout, "auto")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_devices(layout):
    of = case("causal", dict(b=1, s=32, t=32), causal=True, return_lse=True)
    args = of.arrays(), of.cotangents(of.arrays())
    found = jax.jit(pullback(ringed(8, layout, **of.options), of.differentiable))(*args)
    assert_close(found, oracle(of, pullback)(*args), 2e-5)


@pytest.mark.parametrize(
    ("name", "size", "layout", "strategy"),
    [
        pytest.param("causal", 3, "zigzag", "ring", marks=pytest.mark.core),
        *(
            pytest.param(*call, marks=pytest.mark.slow)
            for call in (
                ("window", 2, "contiguous", "ring"),
                ("pairs", 2, "zigzag", "ring"),
                ("segments", 2, "striped", "ring"),
                ("cross", 2, "zigzag", "all_gather"),
                ("window", 2, "striped", "ulysses"),
            )
        ),
    ],
)
def test_tangents(name, size, layout, strategy):
    check(name, size, layout, strategy, tangent)


SECOND = case("second", dict(b=1, s=8, t=8, h=2, g=2, d=4, e=2), dict(sinks="h"), causal=True, return_lse=True)
CASES["second"] = SECOND


@pytest.mark.parametrize("transform", [curvature, pytest.param(curvature_by_reverse, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        ("zigzag", "ring"),
        *(
            pytest.param(*call, marks=pytest.mark.slow)
            for call in (("striped", "ring"), ("contiguous", "ring"), ("zigzag", "all_gather"), ("zigzag", "ulysses"))
        ),
    ],
)
def test_second_order(layout, strategy, transform):
    check("second", 2, layout, strategy, transform)


# --- Precision and what nobody sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of", [pytest.param(f, marks=[] if f is FAMILIES[0] else [pytest.mark.slow]) for f in FAMILIES], ids=str
)
@pytest.mark.parametrize("strategy", ("ring", pytest.param("all_gather", marks=pytest.mark.slow)))
def test_bfloat16_errs_as_the_formula_does(of, strategy):
    """At most twice as much as the formula in bfloat16, and three times in gradients."""
    arrays = of.arrays(dtype=jnp.bfloat16)
    args = arrays, of.cotangents(arrays)
    run = lambda f: jax.jit(pullback(f, of.differentiable))(*args)
    found, formula = run(ringed(2, "zigzag", strategy, **of.options)), run(of.formula)
    exact = oracle(of, pullback)(*args)
    for factor, x, y, z in zip((2, 3), found, formula, exact, strict=True):
        for a, b, c in zip(*map(jax.tree.leaves, (x, y, z)), strict=True):
            finite = np.isfinite(c)
            distance = lambda a, c=c, finite=finite: np.linalg.norm((np.asarray(a, np.float64) - c)[finite])
            assert distance(a) <= factor * max(distance(b), distance(jnp.asarray(c, a.dtype)))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_that_holds_nan(strategy):
    """Keys, values and queries of negative segments reach neither results nor gradients."""
    of = CASES["segments"]
    clean = of.arrays()
    padding = {"q": clean["q_segment_ids"] < 0, "k": clean["kv_segment_ids"] < 0, "v": clean["kv_segment_ids"] < 0}
    filled = lambda value: clean | {n: jnp.where(m[..., None, None], value, clean[n]) for n, m in padding.items()}
    f = jax.jit(pullback(ringed(2, "zigzag", strategy, **of.options), of.differentiable))
    cotangents = of.cotangents(clean)
    assert_close(f(filled(np.nan), cotangents), jax.tree.map(np.asarray, f(filled(1.0), cotangents)), 1e-6)


# --- Programs ---------------------------------------------------------------------------------------------------------


def local_call(size, length=64, **options):
    """The call on sharded arrays and their types, without reordering."""
    mesh = mesh_of(size, AxisType.Explicit)
    sharding = NamedSharding(mesh, P(None, "x"))
    x = {name: jax.ShapeDtypeStruct((1, length * size, 2, 8), jnp.float32, sharding=sharding) for name in "qkv"}
    call = lambda x: lax.ring_attention(**x, axis_name="x", **options)
    return jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), x


def squares(f):
    return jax.grad(lambda x: (f(x) ** 2).sum())


def found_collectives(f, x):
    return dict(collectives(jax.jit(f).lower(x).compile().as_text()))


@pytest.mark.core
def test_collectives_of_a_ring():
    """n − 1 permutes of k and of v; in a backward as many again, and of dk and dv."""
    f, x = local_call(3, causal=True, strategy="ring")
    assert found_collectives(f, x) == {"collective-permute": 4}
    found = found_collectives(squares(f), x)
    assert found.keys() == {"collective-permute"}
    # XLA may find that the first hop of the backward fetches what the first of the forward was sent.
    assert 10 <= found["collective-permute"] <= 12


@pytest.mark.core
def test_a_window_ends_the_ring():
    """Of eight shards of 64 tokens a window of 65 keys meets two, and right of it one more from the other side."""
    f, x = local_call(8, layout="contiguous", strategy="ring", window=(64, 0))
    assert found_collectives(f, x) == {"collective-permute": 2}
    f, x = local_call(8, layout="contiguous", strategy="ring", window=(64, 1))
    assert found_collectives(f, x) == {"collective-permute": 4}


def test_collectives_of_the_others():
    f, x = local_call(2, causal=True, strategy="all_gather")
    assert found_collectives(f, x) == {"all-gather": 2}
    assert found_collectives(squares(f), x) == {"all-gather": 4, "reduce-scatter": 2}
    f, x = local_call(2, causal=True, strategy="ulysses")
    assert found_collectives(f, x).keys() == found_collectives(squares(f), x).keys() == {"all-to-all"}


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_the_memory_of_a_gradient_does_not_grow_with_the_ring(layout):
    def temporary(size):
        f, x = local_call(size, 256, causal=True, layout=layout, strategy="ring")
        return jax.jit(squares(f)).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8) < 1.1 * temporary(4)


def test_kernels_run_once_where_all_keys_are_gathered():
    f, x = local_call(2, causal=True, layout="contiguous", strategy="all_gather")
    program = jax.jit(squares(f)).trace(x).jaxpr
    assert [e.primitive.name for e in equations(program, "flash_attention")].count("flash_attention") == 1


def test_hops_in_which_nothing_is_seen_are_not_computed():
    """Of two hops the causal contiguous ring has one program with a call and one without; zigzag halves its calls."""
    f, x = local_call(2, causal=True, layout="contiguous", strategy="ring")
    calls = equations(jax.make_jaxpr(f)(x), "flash_attention")
    assert [e.invars[0].aval.shape[1] for e in calls] == [64, 64]
    f, x = local_call(2, causal=True, layout="zigzag", strategy="ring")
    calls = equations(jax.make_jaxpr(f)(x), "flash_attention")
    assert [tuple(x.aval.shape[1] for x in e.invars[:2]) for e in calls] == [(64, 64), (32, 64), (64, 32)]


# --- Within other programs --------------------------------------------------------------------------------------------


def whole(x, **options):
    return list(lax.flash_attention(**x, **options))


def of_sines(f):
    return lambda x: sum(jnp.sin(y * 3).sum() for y in f(x))


def random(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


QKV = dict(q=(2, 12, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 8))


@pytest.mark.parametrize("strategy", ("ring", pytest.param("all_gather", marks=pytest.mark.slow)))
def test_explicit_axes_outside(strategy):
    x, options = random(**QKV), dict(causal=True, return_lse=True)
    f = ringed(2, "zigzag", strategy, AxisType.Explicit, **options)
    wanted = jax.value_and_grad(of_sines(lambda x: whole(x, **options)))(x)
    assert_close(jax.jit(jax.value_and_grad(of_sines(f)))(x), wanted, 2e-5)


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
@pytest.mark.parametrize("manual", ({"x", "b"}, {"x"}), ids=("all_manual", "batch_not"))
def test_beside_a_batch_that_is_sharded(types, manual):
    """The batch over another axis, manual or not."""
    x, mesh = random(**QKV), jax.make_mesh((2, 2), ("b", "x"), devices=jax.devices()[:4], axis_types=(types,) * 2)
    inner = P("b", "x") if "b" in manual else P(None, "x")
    call = lambda x: lax.ring_attention(**x, axis_name="x", layout="contiguous", strategy="ring", causal=True)
    f = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=inner, out_specs=inner, axis_names=manual))
    placed = jax.device_put(x, NamedSharding(mesh, P("b", "x")))
    loss = lambda f: lambda x: jnp.sin(3 * f(x)).sum()
    wanted = jax.grad(loss(lambda x: lax.flash_attention(**x, causal=True)))(x)
    assert_close(f(placed), lax.flash_attention(**x, causal=True), 2e-5)
    assert_close(jax.jit(jax.grad(loss(f)))(placed), wanted, 2e-5)


def test_a_sequence_over_two_axes():
    x, mesh = (
        random(**QKV),
        jax.make_mesh((2, 3), ("a", "b"), devices=jax.devices()[:6], axis_types=(AxisType.Auto,) * 2),
    )
    call = lambda x: lax.ring_attention(**x, axis_name=("a", "b"), layout="striped", strategy="ring", causal=True)
    of = P(None, ("a", "b"))
    order, inverse = lax.ring_order(12, 6, "striped")
    found = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=of, out_specs=of))({n: a[:, order] for n, a in x.items()})
    assert_close(found[:, inverse], lax.flash_attention(**x, causal=True), 2e-5)


KEPT = jax.checkpoint_policies.save_only_these_names("ring_attention_o", "ring_attention_lse")


@pytest.mark.parametrize(
    "policy", (None, KEPT, ejkernel.checkpoint_policies.save_kernels), ids=("nothing", "names", "kernels")
)
def test_layers_that_are_scanned_and_checkpointed(policy):
    x, weights = random(q=(1, 12, 2, 8))["q"], random(w=(3, 8, 24))["w"] / 4

    def model(attention):
        def layer(x, w):
            q, k, v = jnp.split(x @ w, 3, -1)
            return x + attention(q, k, v), None

        return lambda x, w: jnp.sin(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0])

    ringed = lambda q, k, v: lax.ring_attention(
        q, k, v, axis_name="x", layout="contiguous", strategy="ring", causal=True
    )
    sharded = jax.shard_map(model(ringed), mesh=mesh_of(3), in_specs=(P(None, "x"), P()), out_specs=P(None, "x"))
    loss = lambda f: lambda x, w: f(x, w).sum()
    wanted = jax.grad(loss(model(lambda q, k, v: lax.flash_attention(q, k, v, causal=True))), (0, 1))(x, weights)
    assert_close(jax.jit(jax.grad(loss(sharded), (0, 1)))(x, weights), wanted, 2e-5)


@pytest.mark.parametrize("strategy", ("ring", pytest.param("all_gather", marks=pytest.mark.slow)))
def test_a_shard_map_that_does_not_check_what_varies(strategy):
    x, size = random(**QKV), 3
    call = lambda x: lax.ring_attention(**x, axis_name="x", layout="contiguous", strategy=strategy, causal=True)
    of = P(None, "x")
    f = jax.shard_map(call, mesh=mesh_of(size), in_specs=of, out_specs=of, check_vma=False)
    loss = lambda f: lambda x: jnp.sin(3 * f(x)).sum()
    wanted = jax.value_and_grad(loss(lambda x: lax.flash_attention(**x, causal=True)))(x)
    assert_close(jax.jit(jax.value_and_grad(loss(f)))(x), wanted, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hessian(strategy):
    x = random(**{name: (1, 4, 2, 2) for name in "qkv"})
    options = dict(causal=True, return_lse=True)
    f, g = ringed(2, "zigzag", strategy, **options), lambda x: whole(x, **options)
    assert_close(jax.jit(jax.hessian(of_sines(f)))(x), jax.jit(jax.hessian(of_sines(g)))(x), 1e-4)


@pytest.mark.parametrize("strategy", ("ring", pytest.param("ulysses", marks=pytest.mark.slow)))
def test_export(strategy):
    """Gradients for a GPU and a TPU, and for this machine, where they are read again and run."""
    f, x = local_call(2, 128, causal=True, strategy=strategy)
    export = lambda *platforms: jax.export.export(
        jax.jit(squares(f)), platforms=platforms, disabled_checks=ejkernel.export_checks()
    )(x).serialize()
    if strategy == "ring":
        with pytest.raises(ejkernel.UnsupportedError, match="export it for each platform by itself"):
            export("cuda", "tpu")
    platforms = ("cpu",) if strategy == "ring" else ("cpu", "cuda", "tpu")
    assert all(map(export, ("cuda", "tpu")))
    again = jax.jit(jax.export.deserialize(export(*platforms)).call)
    arrays = {n: jax.device_put(a, x[n].sharding) for n, a in random(**{n: a.shape for n, a in x.items()}).items()}
    assert_close(again(arrays), jax.tree.map(np.asarray, jax.jit(squares(f))(arrays)), 1e-6)


def test_a_symbolic_length():
    """The length decides what the program is."""
    call = lambda q: lax.ring_attention(q, q, q, axis_name="x", causal=True)
    f = jax.jit(jax.shard_map(call, mesh=mesh_of(2), in_specs=P(None, "x"), out_specs=P(None, "x")))
    q = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 2*s, 2, 8"), jnp.float32)
    with pytest.raises(ValueError, match=r"^ring_attention: the length of q is symbolic, .*; it has to be known"):
        jax.export.export(f)(q)


def test_a_checkpointed_ring_runs_its_forward_once_where_its_results_are_kept():
    """Three hops; the backward computes each of them again in any case."""

    def forwards(policy):
        f, x = local_call(3, layout="contiguous", strategy="ring")
        program = jax.make_jaxpr(squares(jax.checkpoint(f, policy=policy)))(x)
        return [e.primitive.name for e in equations(program, "flash_attention")].count("flash_attention")

    assert (forwards(None), forwards(KEPT)) == (9, 6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vmap(strategy):
    x = random(**{name: (3, *shape) for name, shape in QKV.items()})
    f = ringed(2, "zigzag", strategy, causal=True, return_lse=True)
    g = lambda x: whole(x, causal=True, return_lse=True)
    assert_close(jax.jit(jax.vmap(f))(x), jax.vmap(g)(x), 2e-5)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def refused(size=2, q=(1, 8, 2, 8), k=(1, 8, 2, 8), **options):
    mesh = mesh_of(size)
    call = lambda q, k: lax.ring_attention(q, k, k, **{"axis_name": "x", **options})
    types = [jax.ShapeDtypeStruct((shape[0], size * shape[1], *shape[2:]), jnp.float32) for shape in (q, k)]
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=P(None, "x"), out_specs=P(None, "x")), *types)


CUTS, IDS = np.array([0, 4]), np.zeros((1, 8), np.int32)
WRONG = {
    "there is no axis 'y' here; call it inside jax.shard_map": dict(axis_name="y"),
    "layout is 'spiral'; it must be one of contiguous, striped, zigzag": dict(layout="spiral"),
    "strategy is 'fast'; it must be auto, ring, all_gather, ulysses": dict(strategy="fast"),
    "q has 7 tokens; zigzag needs an even number": dict(q=(1, 7, 2, 8), k=(1, 8, 2, 8)),
    "k has 5 tokens; zigzag needs an even number": dict(k=(1, 5, 2, 8)),
    "k has batch 2 but q has 1": dict(k=(2, 8, 2, 8)),
    "cu_seqlens_q is given, .*give q_segment_ids": dict(cu_seqlens_q=CUTS, cu_seqlens_k=CUTS),
    "max_seqlen_k is given, .*give q_segment_ids": dict(max_seqlen_k=4),
    "dropout_rate is 0.5 but dropout_key is not given": dict(dropout_rate=0.5),
    "window is 0; a number of keys": dict(window=0),
    "bias of shape .* does not broadcast to .*1, 2, 8, 16": dict(bias=np.zeros((8, 8), np.float32)),
    "ulysses splits heads, and 2 query and 2 key/value heads are no multiples of 4 dev": dict(
        size=4, strategy="ulysses"
    ),
    "ulysses would need the bias or mask of all rows": dict(strategy="ulysses", mask=np.ones((8, 16), bool)),
    "all_gather has no causal mask .* use ring, or the layout zigzag": dict(
        strategy="all_gather", layout="striped", causal=True
    ),
    "dropout draws for the places of a weight .* ulysses alone, not with ring": dict(
        strategy="ring", dropout_rate=0.5, dropout_key=np.zeros(2, np.uint32)
    ),
    "dropout draws .* ulysses alone, .*; ulysses splits heads": dict(
        size=3, dropout_rate=0.5, dropout_key=np.zeros(2, np.uint32)
    ),
    "q_segment_ids is given without kv_segment_ids": dict(q_segment_ids=IDS),
}


@pytest.mark.core
@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises(ValueError, match=f"^ring_attention: .*{message}"):
        refused(**WRONG[message])


@pytest.mark.core
def test_outside_of_shard_map():
    x = jnp.zeros((1, 8, 2, 8))
    with pytest.raises(ValueError, match=r"no axis 'x' here; call it inside jax\.shard_map"):
        lax.ring_attention(x, x, x, axis_name="x")
    with pytest.raises(TypeError, match="axis_name is 3; it must be the name of a mesh axis"):
        lax.ring_attention(x, x, x, axis_name=3)


def test_flash_attention_names_it():
    mesh = mesh_of(2, AxisType.Explicit)
    x = jax.device_put(jnp.zeros((1, 8, 2, 8)), NamedSharding(mesh, P(None, "x")))
    with pytest.raises(ValueError, match=r"axis s of q is sharded over 'x'; .*ejkernel.lax.ring_attention"):
        lax.flash_attention(x, x, x)


# --- As an operation of its name --------------------------------------------------------------------------------------


def test_it_is_the_same_in_modules():
    assert modules.ring_order is lax.ring_order


def test_it_is_explained():
    """The strategy with its reason, and the calls of flash_attention."""
    told = []

    def call(q, k, v):
        told.append(ejkernel.explain("ring_attention", q, k, v=v, axis_name="x", causal=True, strategy="ring"))
        told.append(ejkernel.explain("ring_attention", q, k, v=v, axis_name="x", causal=True))
        return q

    x = jax.ShapeDtypeStruct((1, 32, 2, 8), jnp.float32)
    jax.eval_shape(jax.shard_map(call, mesh=mesh_of(2), in_specs=P(None, "x"), out_specs=P(None, "x")), x, x, x)
    assert told[0].runs and told[0].origin.endswith("what follows; strategy ring: it was asked for")
    assert {part.operation for part in told[0].parts} == {"flash_attention"} and len(told[0].parts) == 3
    assert "strategy all_gather: a hop has" in told[1].origin
    assert ejkernel.explain("ring_order", 16, 4, layout="striped").runs
