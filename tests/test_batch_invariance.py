"""With batch_invariant a batch element has the same bits alone and in any batch: results, gradients and tangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import curvature, pullback, tangent

import ejkernel

B, H, G, D = 8, 8, 4, 16
OPTIONS = {
    "causal": ({}, dict(causal=True)),
    "segments": (dict(q_segment_ids=(0, 3), kv_segment_ids=(0, 3)), {}),
    "sinks, window, scale": (dict(sinks=(H,), softmax_scale=()), dict(window=(100, 20))),
    "bias and mask of all": (dict(bias=(1, H, 1, 600), mask=(1, 1, 600, 600)), dict(softcap=5.0)),
    "bias of each": (dict(bias=(B, 1, 600, 1)), {}),
}


def arrays(operands, length=600):
    rng = np.random.default_rng(0)
    made = {n: rng.standard_normal((B, length, h, D)) for n, h in dict(q=H, k=G, v=G).items()}
    for name, shape in operands.items():
        if name.endswith("ids"):
            made[name] = np.sort(rng.integers(*shape, (B, length)), axis=1).astype(np.int32)
        else:
            made[name] = rng.random(shape) < 0.9 if name == "mask" else rng.standard_normal(shape)
    return {n: jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype) for n, x in made.items()}


def of_element(x, n):
    """Element n of the arrays with a batch axis."""
    return {name: a[n : n + 1] if a.ndim > 1 and a.shape[0] == B else a for name, a in x.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.core if n == "causal" else ()) for n in OPTIONS])
def test_alone_and_in_a_batch(name):
    operands, options = OPTIONS[name]
    x = arrays(operands)
    wrt = tuple(n for n in x if n in ("q", "k", "v", "bias", "sinks", "softmax_scale"))
    attend = lambda x: ejkernel.lax.flash_attention(**x, **options, return_lse=True, batch_invariant=True)
    moved = {n: jnp.cos(37 * x[n]) for n in wrt}
    cotangents = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=jnp.float32)).reshape(a.shape), tuple(
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x["q"].shape, (B, H, 600))
    ))  # fmt: skip

    @jax.jit
    def run(x, moved, cotangents):
        return pullback(attend, wrt)(x, cotangents), tangent(attend, wrt)(x, moved)[1]

    (results, gradients), moving = run(x, moved, cotangents)
    whole = (results, moving, {n: g for n, g in gradients.items() if g.ndim > 1 and g.shape[0] == B})
    for n in (0, 5):
        ((results, gradients), moving) = run(
            of_element(x, n), of_element(moved, n), tuple(a[n : n + 1] for a in cotangents)
        )
        alone = (results, moving, {name: gradients[name] for name in whole[2]})
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[n : n + 1]), alone, whole)  # noqa: B023


def test_derivatives_equal_those_without_batch_invariance():
    """Gradients of shared operands are sums over the elements; second derivatives too."""
    x = {n: a[:, :40] if n in "qkv" else a for n, a in arrays(dict(sinks=(H,), bias=(1, H, 40, 1))).items()}
    wrt, moved = tuple(x), {n: jnp.cos(37 * a) for n, a in x.items()}

    def derivatives(**how):
        attend = lambda x: ejkernel.lax.flash_attention(**x, causal=True, **how)
        ct = jnp.cos(x["q"])
        return jax.jit(lambda: (pullback(attend, wrt)(x, ct), curvature(attend, wrt)(x, ct, moved)))()

    for a, b in zip(*map(jax.tree.leaves, (derivatives(batch_invariant=True), derivatives())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_packed_sequences_are_refused_where_their_tiles_depend_on_others():
    q = jnp.ones((40, 2, 8))
    cuts = jnp.array([0, 13, 40])
    with pytest.raises(NotImplementedError, match="where tiles begin within a packed sequence depends on"):
        ejkernel.lax.flash_attention(q, q, q, cu_seqlens_q=cuts, cu_seqlens_k=cuts, batch_invariant=True)
