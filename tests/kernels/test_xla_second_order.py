"""Second derivatives of flash_attention in 16 bits: as exact as those of the formula in that dtype, at any logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel


def formula(q, k, v, sinks):
    """Causal attention with a sink for each head, its softmax in float32 at least."""
    queries, wide = q.shape[1], np.promote_types(q.dtype, np.float32)
    s = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * q.shape[-1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones((1, 1, queries, queries), bool)), s.astype(wide), -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks.astype(wide)[None, :, None, None], (*s.shape[:3], 1))], -1)
    p = jax.nn.softmax(s, -1)[..., :-1].astype(q.dtype)
    return jnp.einsum("bhst,bthd->bshd", p, v, precision="highest")


def ours(q, k, v, sinks):
    return ejkernel.lax.flash_attention(q, k, v, sinks=sinks, causal=True)


def vjp_of_vjp(f, x, moved, cotangent):
    return jax.vjp(lambda x: jax.vjp(f, *x)[1](cotangent), x)[1](moved)[0]


def vjp_of_jvp(f, x, moved, cotangent):
    return jax.vjp(lambda x: jax.jvp(f, x, moved)[1], x)[1](cotangent)[0]


@pytest.mark.parametrize("second", [vjp_of_vjp, vjp_of_jvp], ids=lambda f: f.__name__)
@pytest.mark.parametrize("logits", [1, 4, 36])
def test_of_large_logits(second, logits):
    rng, shape = np.random.default_rng(0), (1, 24, 2, 16)
    normal = lambda *of: jnp.asarray(rng.standard_normal(of), jnp.bfloat16)
    operands = lambda: (normal(*shape), normal(*shape), normal(*shape), normal(2).astype(jnp.float32))
    q, k, v, sinks = operands()
    x, moved, cotangent = (q * logits**0.5, k * logits**0.5, v, sinks), operands(), normal(*shape)
    widened = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float64), tree)
    with jax.enable_x64(True):
        exact = second(formula, *map(widened, (x, moved, cotangent)))

    def errors(f):
        found = jax.jit(second, static_argnums=0)(f, x, moved, cotangent)
        return [np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b) for a, b in zip(found, exact, strict=True)]

    for name, found, allowed in zip(("q", "k", "v", "sinks"), errors(ours), errors(formula), strict=True):
        assert found <= 3 * allowed and found < 0.05, f"{name}: {found} {allowed}"


def jvp_of_vjp(f, x, moved, cotangent):
    return jax.jvp(lambda x: jax.vjp(f, *x)[1](cotangent), (x,), (moved,))[1]


@pytest.mark.parametrize("second", [vjp_of_vjp, jvp_of_vjp], ids=lambda f: f.__name__)
def test_intermediate_overflow_of_float16(second):
    """The tangent of the gradient of logits exceeds 65504, while those of the gradients of q, k and v do not."""
    rng, shape, scale = np.random.default_rng(0), (1, 24, 2, 16), 2.0**-10
    operands = lambda *sizes: tuple(jnp.asarray(n * rng.standard_normal(shape), jnp.float16) for n in sizes)
    x, moved, (cotangent,) = operands(1, 8, 400), operands(400, 1, 1), operands(10)
    call = lambda *x: ejkernel.lax.flash_attention(*x, causal=True, softmax_scale=scale)
    found = jax.jit(second, static_argnums=0)(call, x, moved, cotangent)
    with jax.enable_x64(True):
        widened = jax.tree.map(lambda a: a.astype(jnp.float64), (x, moved, cotangent))
        without_sinks = lambda q, k, v: formula(q * (scale * 4), k, v, jnp.full(2, -np.inf))
        exact = second(without_sinks, *widened)
    for name, a, b in zip("qkv", found, exact, strict=True):
        assert np.linalg.norm(np.float64(a) - b) <= 1e-3 * np.linalg.norm(b), name
