"""The difference of two attentions, and its derivatives, equal those of two calls of flash_attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives, equations

import ejkernel
from ejkernel import lax, modules

pytestmark = pytest.mark.usefixtures("strict")

SHAPES = dict(q1=(2, 5, 4, 8), k1=(2, 12, 2, 8), q2=(2, 5, 4, 8), k2=(2, 12, 2, 8), v=(2, 12, 2, 16), lambda_=(4,))


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def two_calls(q1, k1, q2, k2, v, lambda_, **options):
    first, second = (lax.flash_attention(q, k, v, **options) for q, k in ((q1, k1), (q2, k2)))
    return first - jnp.reshape(lambda_, (-1, 1) if jnp.ndim(lambda_) else ())[None, None] * second


def of(x, **options):
    return lax.differential_attention(**x, **options)


OPTIONS = dict(causal=True, window=(6, 1), softcap=5.0, softmax_scale=0.4)


@pytest.mark.core
def test_two_calls_give_the_same(x):
    loss = lambda f: lambda x: jnp.sin(f(**x, **OPTIONS) * 3).sum()
    assert_close(of(x, **OPTIONS), two_calls(**x, **OPTIONS))
    assert_close(jax.jit(jax.grad(loss(lax.differential_attention)))(x), jax.jit(jax.grad(loss(two_calls)))(x))


@pytest.mark.parametrize("lambda_", (0.3, 2, np.float32(0.3), jnp.float32(0.3)), ids=lambda x: type(x).__name__)
def test_one_factor(x, lambda_):
    assert_close(of(x | dict(lambda_=lambda_)), of(x | dict(lambda_=jnp.full(4, float(lambda_)))))


def test_a_platform_alone_is_that_of_both_attentions(x):
    program = jax.make_jaxpr(lambda x: of(x, config={"platform": "xla"}))(x)
    configs = {equation.params["config"] for equation in equations(program.jaxpr, "flash_attention")}
    alone = jax.make_jaxpr(lambda x: modules.flash_attention(x["q1"], x["k1"], x["v"], platform="xla"))(x)
    assert configs == {equation.params["config"] for equation in equations(alone.jaxpr, "flash_attention")} != set()


def test_equal_attentions_cancel(x):
    alike = x | dict(q2=x["q1"], k2=x["k1"], lambda_=1.0)
    np.testing.assert_array_equal(of(alike, causal=True), 0)


def test_two_forwards_and_two_backwards(x):
    """Each attention is computed once, also in a gradient."""
    count = lambda f: [str(jax.make_jaxpr(f)(x)).count(f" {name}[") for name in NAMES]
    loss = lambda x: of(x, causal=True).sum()
    assert count(loss) == [2, 0, 0]
    assert count(jax.grad(loss)) == [2, 0, 2]
    assert count(lambda x: jax.jvp(loss, (x,), (x,))) == [2, 2, 0]


NAMES = ("flash_attention", "flash_attention_jvp", "flash_attention_bwd")


def test_keys_of_padding_may_hold_anything(x):
    ids = dict(q_segment_ids=jnp.zeros((2, 5), jnp.int32), kv_segment_ids=jnp.where(jnp.arange(12) < 9, 0, -1)[None])
    ids["kv_segment_ids"] = jnp.broadcast_to(ids["kv_segment_ids"], (2, 12)).astype(jnp.int32)
    poisoned = x | {name: x[name].at[:, 9:].set(jnp.nan) for name in ("k1", "k2", "v")}
    here = x | {name: x[name][:, :9] for name in ("k1", "k2", "v")}
    assert_close(of(poisoned, **ids), of(here))
    gradient = jax.grad(lambda x, **more: jnp.sin(of(x, **more)).sum())
    found, expected = gradient(poisoned, **ids), gradient(here)
    for name in here:
        assert_close(found[name][:, :9] if name in ("k1", "k2", "v") else found[name], expected[name])


def test_a_row_that_sees_nothing_is_0(x):
    """With 12 queries and 5 keys the first seven have no visible key."""
    longer = dict(q1=x["k1"], k1=x["q1"][:, :, :2], q2=x["k2"], k2=x["q2"][:, :, :2], v=x["v"][:, :5], lambda_=0.5)
    np.testing.assert_array_equal(of(longer, causal=True)[:, :7], 0)


def test_sharded_heads_are_not_moved(x):
    """Unsharded keys and values are split like the sharded queries."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    heads = P(None, None, "x")
    given = {name: put(a, P("x") if name == "lambda_" else heads if "q" in name else P()) for name, a in x.items()}
    run = jax.jit(of)
    assert run(given).sharding.spec[2] == "x"
    assert_close(run(given), of(x))
    assert not collectives(run.lower(given).compile().as_text())


def test_one_key_value_head_is_shared_by_two_devices(x):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    one = {name: a[:, :, :1] if name in ("k1", "k2", "v") else a for name, a in x.items()}
    heads = NamedSharding(mesh, P(None, None, "x"))
    given = one | {name: jax.device_put(one[name], heads) for name in ("q1", "q2")}
    found = jax.jit(of)(given)
    assert found.sharding.spec[2] == "x"
    assert_close(found, of(one))


f32 = lambda *shape: jnp.zeros(shape, jnp.float32)
WRONG = {
    "q2": (dict(q2=f32(2, 5, 2, 8)), ValueError, "q2 must have the shape of q1"),
    "k2": (dict(k2=f32(2, 11, 2, 8)), ValueError, "k2 must have the shape of k1"),
    "dtype": (dict(q2=jnp.zeros((2, 5, 4, 8), jnp.bfloat16)), TypeError, "q2 is bfloat16 but q1 is float32"),
    "heads": (
        dict.fromkeys(("k1", "k2"), f32(2, 12, 3, 8)) | dict(v=f32(2, 12, 3, 16)),
        ValueError,
        "k1 has 3 heads but q1 has 4; query heads must be a multiple",
    ),
    "v": (dict(v=f32(2, 11, 2, 16)), ValueError, "v has length 11 and 2 heads but k1 has 12 and 2"),
    "lambda": (dict(lambda_=f32(2)), ValueError, "lambda_ must be a scalar or one number of each query head"),
    "integers": (dict(lambda_=jnp.zeros(4, jnp.int32)), TypeError, "lambda_ has dtype int32; it must be a float type"),
    "text": (dict(lambda_="0.5"), TypeError, "lambda_ must be an array, not str"),
    "infinite": (dict(lambda_=float("inf")), ValueError, "lambda_ is inf; it must be finite, and a number of float32"),
    "no number": (dict(lambda_=float("nan")), ValueError, "lambda_ is nan; it must be finite"),
    "large": (dict(lambda_=10**400), ValueError, "lambda_ is inf; it must be finite"),
    "true": (dict(lambda_=True), TypeError, "lambda_ must be an array, not bool"),
    "rank": (dict.fromkeys(("q1", "q2"), f32(5, 4, 8)), ValueError, "q1 has 3 axes; it must have 4"),
    "window": (dict(window=0), ValueError, "window is 0; a number of keys must be at least 1"),
    "segments": (dict(q_segment_ids=jnp.zeros((2, 5), jnp.int32)), ValueError, "given without kv_segment_ids"),
    "bound": (dict(max_seqlen_q=3), ValueError, "max_seqlen_q and max_seqlen_k are for packed sequences"),
    "config": (dict(config=dict(tiles=3)), ValueError, "config has no field tiles"),
}


@pytest.mark.parametrize(("changed", "error", "says"), WRONG.values(), ids=WRONG)
def test_errors_name_the_argument(x, changed, error, says):
    with pytest.raises(error, match=f"^differential_attention: .*{says}") as raised:
        lax.differential_attention(**(x | changed))
    assert type(raised.value) is error and len(str(raised.value)) < 400


def test_it_is_the_same_in_modules_and_explained(x):
    assert modules.differential_attention is lax.differential_attention
    told = ejkernel.explain("differential_attention", *x.values(), causal=True, target="tpu")
    assert told.runs and [part.operation for part in told.parts] == ["flash_attention"]


def test_another_number_for_lambda_is_no_other_program(caplog):
    """Where an array may stand, a number is a value and no static option."""
    x = jnp.ones((1, 4, 1, 8))
    call = lambda lambda_: lax.differential_attention(x, x, x, x, x, lambda_=lambda_)
    call(0.5)
    with jax.log_compiles():
        call(0.25)
    assert not [record for record in caplog.records if record.message.startswith("Compiling")]
