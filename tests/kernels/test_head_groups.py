"""flash_mla by one group of heads after the other computes what it computes by all heads, in less memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import lax
from ejkernel.kernels import _flash_mla
from ejkernel.kernels._head_groups import groups_of
from ejkernel.kernels._target import lowering_for
from ejkernel.types import Target

B, S, H, R, D, ROPE, V = 2, 24, 6, 16, 8, 4, 8
SHAPES = dict(q=(B, S, H, D + ROPE), kv_latent=(B, S, R), k_rope=(B, S, ROPE), w_kc=(R, H, D), w_vc=(R, H, V))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = {name: normal(n, *shape) for n, (name, shape) in enumerate(SHAPES.items())}
FEATURES = {
    "causal": (dict(), dict(causal=True)),
    "bias": (dict(bias=normal(10, 1, H, S, S)), {}),
    "shared bias": (dict(bias=normal(10, B, 1, S, S)), {}),
    "mask, sinks": (dict(sinks=normal(11, H)), dict(mask=normal(12, B, 1, S, S) > -1)),
    "segments": (dict(), dict(q_segment_ids=np.arange(S)[None] // 9 + np.zeros((B, 1), int))),
    "scale": (dict(softmax_scale=np.float32(0.4)), dict(causal=True)),
    "dropout": (dict(), dict(dropout_rate=0.3, dropout_key=jax.random.key(5))),
}
"""What is differentiated beside the five operands, and the other options."""


@pytest.fixture
def two_heads_at_once(monkeypatch):
    monkeypatch.setattr(_flash_mla, "MOST_BYTES", 2 * B * S * (D + ROPE + V) * 4)


def results(x, moved, options):
    """o and lse, all gradients, and the tangents along `moved`."""
    if "q_segment_ids" in options:
        options = options | dict(kv_segment_ids=options["q_segment_ids"])
    call = lambda x: lax.flash_mla(**x, **options, return_lse=True)
    loss = lambda x: sum((jnp.sin(a) * jnp.cos(jnp.arange(a.size).reshape(a.shape))).sum() for a in call(x))
    return jax.jit(call)(x), jax.jit(jax.grad(loss))(x), jax.jit(lambda *of: jax.jvp(call, *of))((x,), (moved,))


@pytest.mark.parametrize("name", FEATURES)
def test_groups_of_heads(name, monkeypatch, two_heads_at_once):
    further, options = FEATURES[name]
    x = jax.tree.map(jnp.asarray, X | further)
    moved = {name: jnp.asarray(normal(20 + n, *a.shape)) for n, (name, a) in enumerate(x.items())}
    in_groups = results(x, moved, options)
    monkeypatch.setattr(_flash_mla, "MOST_BYTES", 1 << 31)
    jax.clear_caches()
    for found, expected in zip(*map(jax.tree.leaves, (in_groups, results(x, moved, options))), strict=True):
        assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_memory_grows_with_a_group_and_not_with_the_heads(two_heads_at_once):
    """A forward of all heads at once has all their keys and values, and what the groups of a loop have is less."""
    forward = partial(lax.flash_mla, causal=True)

    def temporary(heads, length):
        shapes = dict(SHAPES, q=(B, length, heads, D + ROPE), w_kc=(R, heads, D), w_vc=(R, heads, V))
        shapes |= dict(kv_latent=(B, length, R), k_rope=(B, length, ROPE))
        x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return jax.jit(lambda x: forward(**x)).lower(x).compile().memory_analysis().temp_size_in_bytes

    keys = 4 * B * 512 * 64 * (D + ROPE + V)
    assert temporary(64, 512) < keys
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flash_mla, "MOST_BYTES", 1 << 31)
        jax.clear_caches()
        assert temporary(64, 512) > keys


@pytest.mark.parametrize("platform", ("triton", "pallas"))
def test_kernels_of_gpus_are_called_in_a_loop(platform):
    """DeepSeek-V3's layer with 32k tokens, of which forward and backward expand 64 of 128 heads at once."""
    shapes = dict(q=(1, 32768, 128, 192), kv_latent=(1, 32768, 512), k_rope=(1, 32768, 64))
    shapes |= dict(w_kc=(512, 128, 128), w_vc=(512, 128, 128))
    x = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    loss = lambda x: lax.flash_mla(**x, causal=True).astype(jnp.float32).sum()
    with lowering_for(Target("cuda", "NVIDIA H200" if platform == "pallas" else "NVIDIA A100")):
        text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.while") >= 2 and "32768x128x192xbf16> loc" not in text


def test_groups_have_equally_many_heads():
    assert [groups_of(12, 100, most) for most in (100, 99, 26, 24, 9, 1)] == [1, 2, 4, 6, 12, 12]
