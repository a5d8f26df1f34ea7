"""How many thread blocks of a backward share a tile of keys, and what is lowered for them."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.configs import space
from ejkernel.kernels._query_splits import LAUNCH, MOST, OVERHEAD, splits_for_cache, splits_of
from ejkernel.kernels._target import lowering_for
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .mosaic import HOPPER, arguments, lowered, run


@pytest.mark.parametrize(
    "tiles, steps, causal, splits",
    [
        (8, 512, True, 33),  # two thread blocks for each multiprocessor
        (128, 128, True, 2),  # one wave, of which the first tile has twice the mean steps
        (192, 192, True, 2),
        (264, 1024, True, 1),
        (132, 1024, False, 1),
        (66, 1024, False, 2),
        (32, 64, False, 4),
        (64, 8, True, 1),  # too few steps
        (1, 10**6, True, MOST),
        (0, 0, False, 1),
    ],
)
def test_number_of_splits(tiles, steps, causal, splits):
    found = splits_of(tiles, steps, 132, causal)
    assert abs(found - splits) <= splits // 8


@pytest.mark.parametrize("causal", [True, False])
def test_splits_pay_for_their_sums(causal):
    """None are made where they would save fewer steps than they cost."""
    for tiles in range(1, 300):
        for steps in (1, 7, 50, 1000):
            if (splits := splits_of(tiles, steps, 132, causal)) > 1:
                assert splits <= steps
                assert steps * (1 - 1 / splits) > LAUNCH + OVERHEAD * tiles * splits / 132


@pytest.mark.parametrize(
    "group, kv_heads, tiles, length, most, splits",
    [
        (8, 8, 64, 4096, 4, 4),  # 64 thread blocks use 67 MB, and 132 twice as much
        (8, 8, 64, 4096, 2, 2),
        (8, 8, 64, 4096, 0.5, 1),
        (8, 1, 64, 4096, 4, 1),
        (6, 8, 64, 4096, 3, 3),  # as many heads each
        (2, 8, 128, 8192, 1, 1),
        (8, 64, 8, 512, 4, 4),
        (8, 1, 1, 64, 4, 1),
        (1, 8, 2048, 131072, 1, 1),
        (8, 8, 0, 0, 4, 1),
    ],
)
def test_heads_that_fit_in_the_cache(group, kv_heads, tiles, length, most, splits):
    """Of 256 features: 2 KB of q, do and dq for a query."""
    assert splits_for_cache(group, kv_heads, tiles, 2048 * length, most, 132) == splits


@pytest.mark.parametrize(
    "length, options, splits",
    [
        (4096, dict(causal=True), 4),
        (1024, dict(causal=True), 4),
        (4096, dict(), 1),
        (4096, dict(causal=True, window=(1023, 0)), 1),
        (4096, dict(causal=True, deterministic=True), 1),
        (4096, dict(causal=True, batch_invariant=True), 1),
    ],
)
def test_sums_of_the_heads_of_a_group(length, options, splits):
    """16 heads of 256 features, of which 8 share keys, 16k tokens."""
    batch = 16384 // length
    x = Operands(*(jax.ShapeDtypeStruct((batch, length, heads, 256), jnp.bfloat16) for heads in (16, 2, 2)))
    spec = FlashAttentionSpec(**options)
    with lowering_for(HOPPER):
        config = space("flash_attention_bwd", x, spec, HOPPER)[0]
        text = lowered(run("flash_attention_bwd", spec, config), *arguments(x))
    assert (f"tensor<{splits * batch * length}x2x256xf32>" in text) == (splits > 1)


@pytest.mark.parametrize("invariant", [True, False], ids=["batch_invariant", ""])
def test_float32_sums_are_lowered_unless_they_depend_on_the_batch(invariant):
    x = Operands(*(jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.bfloat16) for heads in (16, 1, 1)))
    spec = FlashAttentionSpec(causal=True, batch_invariant=invariant)
    with lowering_for(HOPPER):
        config = space("flash_attention_bwd", x, spec, HOPPER)[0]
        text = lowered(run("flash_attention_bwd", spec, config), *arguments(x))
    assert ("x1x64xf32>" in text) != invariant
