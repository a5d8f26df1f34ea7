"""Attention over two sets of keys, merged, is the attention over all of them, through every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import collectives

import ejkernel
from ejkernel import lax, modules
from ejkernel.__main__ import main
from ejkernel.modules._composed import COMPOSED

pytestmark = pytest.mark.usefixtures("strict")

SHAPES = dict(q=(2, 5, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 6))
HALVES = (slice(None, 7), slice(7, None))


@pytest.fixture
def x():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in SHAPES.items()}


def whole(x):
    return lax.flash_attention(x["q"], x["k"], x["v"], return_lse=True)


def merged(x):
    parts = [lax.flash_attention(x["q"], x["k"][:, of], x["v"][:, of], return_lse=True) for of in HALVES]
    return lax.merge_attention(*parts[0], *parts[1])


def loss(f):
    return lambda x: sum(jnp.sin(y * 3).sum() for y in f(x))


@pytest.mark.core
def test_the_parts_make_the_whole(x):
    assert_close(jax.jit(merged)(x), whole(x))
    assert_close(merged(x), whole(x))


@pytest.mark.parametrize(
    "transform",
    [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1], pytest.param(jax.hessian, marks=pytest.mark.slow)],
)
def test_derivatives(x, transform):
    x = {name: a[:1, :3] for name, a in x.items()} if transform is jax.hessian else x
    halves = lambda x: merged(x)
    if transform is jax.hessian:
        x["k"], x["v"] = x["k"][:, :3], x["v"][:, :3]
        halves = lambda x: lax.merge_attention(
            *lax.flash_attention(x["q"], x["k"][:, :1], x["v"][:, :1], return_lse=True),
            *lax.flash_attention(x["q"], x["k"][:, 1:], x["v"][:, 1:], return_lse=True),
        )
    assert_close(transform(loss(halves))(x), transform(loss(whole))(x), tolerance=1e-5)


def test_vmap(x):
    batch = {name: jnp.stack([a, a + 1, a * 2]) for name, a in x.items()}
    for i, part in enumerate(zip(*jax.vmap(merged)(batch), strict=True)):
        assert_close(part, whole({name: a[i] for name, a in batch.items()}))


@pytest.mark.parametrize("types", (AxisType.Auto, AxisType.Explicit), ids=("auto", "explicit"))
def test_sharded_over_batch_and_heads(x, types):
    """Nothing is communicated."""
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(types,) * 2)
    placed = {name: jax.device_put(a, NamedSharding(mesh, P("b", None, "h"))) for name, a in x.items()}
    compiled = jax.jit(merged).lower(placed).compile()
    assert_close(compiled(placed), whole(x))
    assert not collectives(compiled.as_text())


def test_packed_and_paged_logsumexps():
    """[H, T] and [T, H] of the same rows."""
    rng = np.random.default_rng(1)
    o, other = (jnp.asarray(rng.standard_normal((6, 3, 4)), jnp.float32) for _ in range(2))
    a, b = (jnp.asarray(rng.standard_normal((3, 6)), jnp.float32) for _ in range(2))
    packed, paged = lax.merge_attention(o, a, other, b), lax.merge_attention(o, a.T, other, b.T)
    assert_close((packed[0], packed[1].T), paged)


def test_rows_that_see_nothing():
    """In one set, the other, or both: their o may be anything, and gradients are 0."""
    lse = jnp.array([[1.0, -np.inf, 2.0, -np.inf]]), jnp.array([[0.5, 3.0, -np.inf, -np.inf]])
    o = [jnp.where(jnp.isfinite(a).T[..., None], 1.0 + n, np.nan) for n, a in enumerate(lse)]
    found, total = lax.merge_attention(o[0], lse[0], o[1], lse[1])
    share = np.exp(1) / (np.exp(1) + np.exp(0.5))
    np.testing.assert_allclose(found[:, 0, 0], [share + 2 * (1 - share), 2, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(total[0], [np.logaddexp(1, 0.5), 3, 2, -np.inf], rtol=1e-6)
    gradients = jax.grad(lambda *x: lax.merge_attention(x[0], x[1], x[2], x[3])[0].sum(), (0, 1, 2, 3))
    of_o_a, of_a, of_o_b, of_b = gradients(o[0], lse[0], o[1], lse[1])
    np.testing.assert_allclose(of_o_a[:, 0, 0], [share, 0, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(of_o_b[:, 0, 0], [1 - share, 1, 0, 0], rtol=1e-6)
    assert np.isfinite([*of_a[0], *of_b[0]]).all()


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_half_precision_is_rounded_once(x, dtype):
    parts = [lax.flash_attention(x["q"], x["k"][:, of], x["v"][:, of], return_lse=True) for of in HALVES]
    (a, lse_a), (b, lse_b) = ((o.astype(dtype), lse) for o, lse in parts)
    found, lse = lax.merge_attention(a, lse_a, b, lse_b)
    exact, _ = lax.merge_attention(a.astype(jnp.float32), lse_a, b.astype(jnp.float32), lse_b)
    assert found.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_array_equal(found, exact.astype(dtype))


WRONG = {
    "o_a has 2 axes": dict(o_a=(6, 4)),
    "o_b must be as o_a": dict(o_b=(6, 3, 5)),
    "lse_b must be as lse_a": dict(lse_b=(6, 3)),
    r"lse_a must be \[3, 6\] or \[6, 3\]": dict(lse_a=(6, 4), lse_b=(6, 4)),
    "there are 3 tokens and heads; heads_last": dict(o_a=(3, 3, 4), o_b=(3, 3, 4), lse_a=(3, 3), lse_b=(3, 3)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    shapes = dict(o_a=(6, 3, 4), lse_a=(3, 6), o_b=(6, 3, 4), lse_b=(3, 6)) | WRONG[message]
    with pytest.raises(ValueError, match=f"merge_attention: {message}"):
        lax.merge_attention(**{name: jnp.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "shapes, told, error, message",
    [
        (((6, 3, 4), (6, 3)), 1, TypeError, "heads_last must be True or False, not int"),
        (((6, 3, 4), (6, 3)), "no", TypeError, "heads_last must be True or False, not str"),
        (((2, 6, 3, 4), (2, 3, 6)), True, ValueError, r"heads_last is True but o_a is \[B, S, H, V\], whose lse is"),
    ],
)
def test_wrong_heads_last(shapes, told, error, message):
    o, lse = map(jnp.zeros, shapes)
    with pytest.raises(error, match=f"merge_attention: {message}"):
        lax.merge_attention(o, lse, o, lse, heads_last=told)


def test_heads_last_where_the_shapes_do_not_tell():
    o, lse = jnp.ones((3, 3, 4)), jnp.arange(9.0).reshape(3, 3)
    first, last = (lax.merge_attention(o, lse, 2 * o, -lse, heads_last=told)[0] for told in (False, True))
    np.testing.assert_allclose(first, lax.merge_attention(o, lse.T, 2 * o, -lse.T, heads_last=True)[0])
    assert not np.allclose(first, last)


# --- As an operation of its name


def test_it_is_the_same_in_modules(x):
    assert modules.merge_attention is lax.merge_attention


def test_it_is_explained(x):
    o, lse = whole(x)
    told = ejkernel.explain("merge_attention", o, lse, o, lse)
    assert told.runs and str(told) == f"merge_attention on {told.target}: {told.origin}"
    assert told.origin == "composed of operations of JAX, which XLA computes"


def test_explain_shows_the_composed_calls(x, monkeypatch):
    """Each call once, including those in a jitted function, with the config that it would use."""

    def halves(q, k, v, *, causal=False):
        parts = [
            jax.jit(lambda k, v: lax.flash_attention(q, k, v, return_lse=True))(k[:, of], v[:, of]) for of in HALVES
        ]
        return lax.merge_attention(*parts[0], *parts[0])[0]

    monkeypatch.setitem(COMPOSED, "halves", halves)
    told = ejkernel.explain("halves", x["q"], x["k"], v=x["v"], target="tpu")
    assert [part.operation for part in told.parts] == ["flash_attention", "flash_attention"] and told.runs
    assert all(part.config is not None and f"{part}" in str(told) for part in told.parts)
    refused = ejkernel.explain("halves", x["q"], x["k"], v=x["v"], target="cpu", platform="triton")
    assert not refused.runs and "platform 'triton' was asked for" in str(refused)
    with pytest.raises(ValueError, match=r"no such operation: thirds; known are .*halves"):
        ejkernel.explain("thirds", x["q"])


def test_the_command_explains_it(capsys):
    arguments = "--array o_a=f32[1,8,2,4] --array lse_a=f32[1,2,8] --array o_b=f32[1,8,2,4] --array lse_b=f32[1,2,8]"
    assert main(["explain", "merge_attention", *arguments.split()]) == 0
    assert "merge_attention on cpu" in capsys.readouterr().out
