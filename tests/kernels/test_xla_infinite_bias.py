"""A bias of −∞ hides a logit as a mask does, in XLA: results and derivatives of any order are those of the mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, curvature, curvature_by_reverse, gradient, pullback, tangent

import ejkernel

B, S, T, H, G, D = 2, 24, 48, 4, 2, 8  # whole tiles: without padding no logit is hidden but by the bias
SMALL = dict(block_q=8, block_k=16)
ROWS, COLUMNS = np.arange(S)[:, None], np.arange(T)
VISIBLE = {
    "triangle": COLUMNS <= ROWS,
    "first tile": np.broadcast_to(COLUMNS >= 16, (S, T)),
    "last tile": np.broadcast_to(COLUMNS < 32, (S, T)),
    "middle tile": np.broadcast_to((COLUMNS < 16) | (COLUMNS >= 32), (S, T)),
    "rows of nothing": (ROWS % 3 > 0) & (COLUMNS > ROWS),
    "nothing": np.zeros((S, T), bool),
}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def arrays(**more):
    q, k, v = normal(B, S, H, D, seed=1), normal(B, T, G, D, seed=2), normal(B, T, G, D, seed=3)
    return dict(q=q, k=k, v=v, bias=normal(1, H, S, T, seed=4), **more)


def call(x, **options):
    return ejkernel.lax.flash_attention(**x, return_lse=True, config=SMALL, **options)


def hidden(x, visible):
    return x | dict(bias=jnp.where(visible, x["bias"], -jnp.inf))


@functools.partial(jax.jit, static_argnames="options")
def derivatives(x, mask, cotangents, moved, options=()):
    """Results, gradients and tangents, and how gradients change."""
    wrt, f = tuple(moved), lambda x: call(x, **({} if mask is None else {"mask": mask}), **dict(options))
    of = lambda transform, *given: transform(f, wrt)(x, *given)
    return of(pullback, cotangents), of(tangent, moved), of(curvature, cotangents, moved)


def compared(x, visible, **options):
    """With −∞ for a bias, and with the mask."""
    moved = {name: normal(*a.shape, seed=5) for name, a in x.items()}
    cotangents = tuple(normal(*a.shape, seed=6) for a in jax.eval_shape(call, x))
    run = functools.partial(derivatives, cotangents=cotangents, moved=moved, options=tuple(options.items()))
    assert_close(run(hidden(x, visible), None), run(x, jnp.asarray(visible)[None, None]))


@pytest.mark.parametrize("name", VISIBLE)
def test_it_is_a_mask(name):
    compared(arrays(), VISIBLE[name])


def test_beside_sinks_some_of_which_are_infinite_too():
    sinks = normal(H, 2, seed=7).at[0, 0].set(-jnp.inf).at[1].set(-jnp.inf)
    compared(arrays(sinks=sinks), VISIBLE["rows of nothing"])


def test_beside_a_causal_mask():
    compared(arrays(), VISIBLE["middle tile"], causal=True)


def test_gradients_of_gradients():
    x, visible = arrays(), VISIBLE["rows of nothing"]
    moved = {name: normal(*a.shape, seed=5) for name, a in x.items()}
    cotangents = tuple(normal(*a.shape, seed=6) for a in jax.eval_shape(call, x))
    masked = lambda x: call(x, mask=jnp.asarray(visible)[None, None])
    run = lambda f, x: jax.jit(curvature_by_reverse(f, tuple(x)))(x, cotangents, moved)
    assert_close(run(call, hidden(x, visible)), run(masked, x))


def test_rows_of_nothing():
    """o = 0 and lse = −∞, or the logsumexp of sinks."""
    x = hidden(arrays(), VISIBLE["nothing"])
    o, lse = call(x)
    assert not o.any() and (lse == -jnp.inf).all()
    sinks = normal(H, 2, seed=7)
    o, lse = call(x | dict(sinks=sinks))
    assert not o.any()
    np.testing.assert_allclose(lse, np.broadcast_to(jax.nn.logsumexp(sinks, axis=1)[:, None], lse.shape), rtol=1e-6)


def test_a_capped_logit_is_as_low_as_the_cap_allows():
    """softcap · tanh(−∞) = −softcap, which only a mask changes to −∞."""
    x = hidden(arrays(), VISIBLE["triangle"])
    low = x | dict(bias=jnp.maximum(x["bias"], -1e30))
    cotangents = tuple(normal(*a.shape, seed=6) for a in jax.eval_shape(call, x))
    run = jax.jit(gradient(functools.partial(call, softcap=3.0), tuple(x)))
    assert_close(run(x, cotangents), run(low, cotangents))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_a_mask_as_other_libraries_take_it(dtype):
    """[600, 600], more than a tile of the heuristic config."""
    visible = np.tri(600, dtype=bool)
    bias = jnp.where(visible, 0, -jnp.inf).astype(dtype)
    q, k, v = (normal(1, 600, 2, 8, seed=n).astype(dtype) for n in range(3))
    attend = ejkernel.lax.flash_attention
    of = lambda **how: jax.jit(pullback(lambda x: attend(**x, **how), "qkv"))(dict(q=q, k=k, v=v), q)
    assert_close(of(bias=bias), of(causal=True), 1e-5 if dtype == "float32" else 1e-2)
