"""The XLA implementation of flash_mla: results against a formula in NumPy, and its cost."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

pytestmark = pytest.mark.usefixtures("x64")

B, S, K, H, R, DN, DR, V = 2, 9, 14, 3, 6, 5, 4, 7
NAMES = ("q", "kv_latent", "k_rope", "w_kc", "w_vc")
SHAPES = (B, S, H, DN + DR), (B, K, R), (B, K, DR), (R, H, DN), (R, H, V)
TILES = {"one": None, "several": (dict(block_q=4, block_k=5), dict(block_q=5, block_k=4))}


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape)


X = dict(zip(NAMES, (normal(*shape) for shape in SHAPES), strict=True))
DO, DLSE = normal(B, S, H, V), normal(B, H, S)
SEGMENTS = dict(q_segment_ids=np.repeat([[0, 1, -1]], 3, 1), kv_segment_ids=np.repeat([[0, 1]], 7, 1))
SEGMENTS = {name: np.repeat(ids, B, 0) for name, ids in SEGMENTS.items()}


def formula(q, kv_latent, k_rope, w_kc, w_vc, seen, softcap=None, sinks=None, bias=0.0):
    """o [B,S,H,V] and lse [B,H,S], a head and a query at a time; seen [B,H,S,K]."""
    o, lse = np.zeros((B, S, H, V)), np.full((B, H, S), -np.inf)
    for b, h, i in np.ndindex(B, H, S):
        k = np.concatenate([kv_latent[b] @ w_kc[:, h], k_rope[b]], axis=1)[seen[b, h, i]]
        v = (kv_latent[b] @ w_vc[:, h])[seen[b, h, i]]
        s = k @ q[b, i, h] / math.sqrt(DN + DR) + np.broadcast_to(bias, seen.shape)[b, h, i][seen[b, h, i]]
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        every = s if sinks is None else np.concatenate([s, sinks[h]])
        if len(every):
            lse[b, h, i] = np.log(np.exp(every).sum())
            o[b, i, h] = np.exp(s - lse[b, h, i]) @ v
    return o, lse


def seen_by(causal=False, window=None, q_segment_ids=None, kv_segment_ids=None, mask=True, **_):
    """[B,H,S,K] bool."""
    distance = np.arange(K) - (np.arange(S)[:, None] + K - S)
    left, right = window or (K, K)
    ok = (distance <= (0 if causal else right)) & (distance >= -left)
    if q_segment_ids is not None:
        ids, kv_ids = q_segment_ids[:, None, :, None], kv_segment_ids[:, None, None]
        ok = ok & (ids == kv_ids) & (ids >= 0)
    return np.broadcast_to(ok & mask, (B, H, S, K))


CALLS = {
    "all": dict(),
    "causal": dict(causal=True),
    "window, softcap and sinks": dict(window=(3, 1), softcap=1.5, sinks=normal(H, 2)),
    "segments and bias": dict(**SEGMENTS, bias=normal(B, H, S, K), causal=True),
    "mask": dict(mask=normal(1, H, S, K) > 0.3),
}


def wanted(x, options):
    given = {name: a for name, a in options.items() if name in ("softcap", "sinks", "bias")}
    return formula(**x, seen=seen_by(**options), **given)


def loss(x, options):
    """Σ do·o + Σ dlse·lse."""
    o, lse = wanted(x, options)
    return (DO * o).sum() + (DLSE * np.where(np.isfinite(lse), lse, 0)).sum()


def differences(f, x, step=1e-5):
    """The gradient of f in an array, by central differences."""
    found = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[at] = step
        found[at] = (f(x + moved) - f(x - moved)) / (2 * step)
    return found


def close(found, wanted, tolerance=1e-12):
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("call", CALLS)
def test_equals_the_formula(call, tiles):
    options = CALLS[call]
    found = ejkernel.lax.flash_mla(**X, **options, return_lse=True, config=TILES[tiles])
    for a, b in zip(found, wanted(X, options), strict=True):
        close(a, b)


def with_one_tiling(calls):
    """Every call with both tilings, a normal run with one of them, alternately."""
    for i, call in enumerate(calls):
        for j, tiles in enumerate(TILES):
            yield pytest.param(call, tiles, marks=() if (i + j) % 2 else pytest.mark.slow)


@pytest.mark.parametrize("call, tiles", list(with_one_tiling(CALLS)))
def test_gradients_are_those_of_the_formula(call, tiles):
    """By finite differences of it; the tangent is dual to them, <u, Jt> = <Jᵀu, t>."""
    options = CALLS[call]
    run = jax.jit(lambda x: ejkernel.lax.flash_mla(**x, **options, return_lse=True, config=TILES[tiles]))
    (_, lse), pull = jax.vjp(run, X)
    dlse = np.where(np.isfinite(lse), DLSE, 0)
    (gradients,) = pull((jnp.asarray(DO), jnp.asarray(dlse)))
    for name in NAMES:
        of = differences(lambda a, name=name: loss({**X, name: a}, options), X[name])
        close(gradients[name], of, 1e-7)
    t = {name: normal(*shape, 1)[..., 0] for name, shape in zip(NAMES, SHAPES, strict=True)}
    _, (do, moved) = jax.jvp(run, (X,), (t,))
    along = sum((gradients[name] * t[name]).sum() for name in NAMES)
    close((DO * do).sum() + np.where(np.isfinite(lse), dlse * moved, 0).sum(), along, 1e-10)


@pytest.mark.parametrize("call, tiles", list(with_one_tiling(("window", "segments", "mask"))))
def test_invisible_keys_may_be_nan(call, tiles):
    """In results, gradients, tangents, and derivatives of gradients in either order."""
    hidden = np.arange(K) >= K - 4
    options = {
        "window": dict(window=(2, 0)),
        "segments": dict(SEGMENTS, kv_segment_ids=np.where(hidden, 7, SEGMENTS["kv_segment_ids"])),
        "mask": dict(mask=np.broadcast_to(~hidden, (S, K))),
    }[call]
    hidden_keys = ~seen_by(**options).any((1, 2))
    assert hidden_keys.any() and not hidden_keys.all()
    poisoned = {
        n: np.where(hidden_keys[..., None], np.nan, X[n]) if n in ("kv_latent", "k_rope") else X[n] for n in NAMES
    }
    t = {n: np.ones_like(x) for n, x in X.items()}
    moved = {n: np.where(np.isnan(x), np.nan, 1.0) for n, x in poisoned.items()}

    def total(x):
        o, lse = ejkernel.lax.flash_mla(**x, **options, return_lse=True, config=TILES[tiles])
        return (DO * o**2).sum() + jnp.where(jnp.isfinite(lse), DLSE * lse, 0).sum()

    of = jax.grad(total)
    along = lambda x, t: sum((a * b).sum() for a, b in zip(jax.tree.leaves(of(x)), jax.tree.leaves(t), strict=True))
    programs = {
        "gradient": lambda x, t: of(x),
        "tangent": lambda x, t: jax.jvp(total, (x,), (t,)),
        "forward over reverse": lambda x, t: jax.jvp(of, (x,), (t,))[1],
        "reverse over reverse": lambda x, t: jax.grad(along)(x, {n: normal(*a.shape) for n, a in x.items()}),
    }
    for program in map(jax.jit, programs.values()):
        jax.tree.map(partial(close, tolerance=1e-11), program(poisoned, moved), program(X, t))


def test_half_precision_rounds_a_gradient_once():
    """The gradients of latents and projections are sums over heads and positions: as near as their dtype allows."""
    x = {n: jnp.asarray(a, jnp.bfloat16) for n, a in X.items()}
    wide = {n: a.astype(jnp.float64) for n, a in x.items()}
    total = lambda x: ejkernel.lax.flash_mla(**x, causal=True).astype(jnp.float64).sum()
    found, exact = jax.grad(total)(x), jax.grad(total)(wide)
    for name in NAMES:
        error = np.linalg.norm(found[name].astype(jnp.float64) - exact[name]) / np.linalg.norm(exact[name])
        assert found[name].dtype == jnp.bfloat16 and error < 8e-3, (name, error)


def test_every_example_may_have_its_own_projections():
    """Of latents and queries that all share."""
    projections = {n: np.stack([X[n], 2 * X[n], -X[n]]) for n in ("w_kc", "w_vc")}
    run = lambda **x: jax.grad(lambda x: (ejkernel.lax.flash_mla(**x, causal=True) ** 2).sum())(x)
    axes = {n: 0 if n in projections else None for n in NAMES}
    found = jax.vmap(lambda x: run(**x), (axes,))(X | projections)
    for i in range(3):
        alone = run(**{**X, **{n: x[i] for n, x in projections.items()}})
        jax.tree.map(close, {n: x[i] for n, x in found.items()}, alone)


def test_memory_is_that_of_the_keys_and_values():
    """No array has the size of the logits, forward or backward; the program is compiled, and not run."""
    tokens, of = 2**15, lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    x = dict(q=of(1, tokens, 2, 96), kv_latent=of(1, tokens, 256), k_rope=of(1, tokens, 32))
    x |= dict(w_kc=of(256, 2, 64), w_vc=of(256, 2, 64))
    call = lambda x: ejkernel.lax.flash_mla(**x, causal=True).sum()
    compiled = jax.jit(jax.grad(call)).lower(x).compile()
    shapes = re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in shapes) <= tokens * 256
    assert compiled.memory_analysis().temp_size_in_bytes < 2**30
