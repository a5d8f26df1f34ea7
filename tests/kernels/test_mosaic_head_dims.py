"""Head dims in Mosaic GPU: their parts, configs that fit, and kernels of any pair of them."""

import re
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention.configs import (
    SHARED_BYTES,
    blocks_of_keys,
    shared_bytes,
    space,
)
from ejkernel.kernels._pallas.gpu.flash_attention.head_dims import parts_of, tile_width
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands

from .mosaic import CUSTOM_CALL, HOPPER, PREDICATES, SIGHTS, arguments, kernels, lowered, q, run


@pytest.mark.parametrize("sight", ["full", "causal", *SIGHTS])
@pytest.mark.parametrize(
    "D, V", [(72, 72), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((64, 64), (192, 128), (256, 256)))]
)
def test_gradients_of_certain_bits_lower(D, V, sight):
    x = of_head_dims(D, V, q.shape[1] if sight in SIGHTS else 640, **SIGHTS.get(sight, {}))
    spec = FlashAttentionSpec(causal=sight != "full", deterministic=True)
    (config, *_) = space("flash_attention_bwd", x, spec, HOPPER)
    text = lowered(run("flash_attention_bwd", spec, config), *arguments(x))
    assert text.count(f"custom_call @{CUSTOM_CALL}") == kernels("flash_attention_bwd", x)


HEAD_DIMS = [(D, D) for D in (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)]
HEAD_DIMS += [(192, 128), (96, 64), (64, 128), (72, 104), (40, 72), (256, 16), (80, 160), (136, 136), (40, 256)]


def of_head_dims(D: int, V: int, length: int = 640, **arrays) -> Operands:
    sized = lambda heads, width: jax.ShapeDtypeStruct((2, length, heads, width), jnp.bfloat16)
    return Operands(sized(4, D), sized(2, D), sized(2, V), **arrays)


# A head dim of each number of parts and each swizzle, with the most frequent masks; the rest takes long.
FAST = [(24, 24), (72, 72), (80, 80), (96, 64), (160, 160)]


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize(
    "D, V, sight",
    [
        pytest.param(*size, sight, marks=[] if size in FAST and sight in ("causal", "segments") else pytest.mark.slow)
        for size in HEAD_DIMS
        for sight in ("full", "causal", *SIGHTS)
    ],
)
def test_head_dims_lower(D, V, sight, operation):
    """Without a mask by every config, and with all masks by the heuristic one. No feature is padded."""
    x = of_head_dims(D, V, q.shape[1] if sight in SIGHTS else 640, **SIGHTS.get(sight, {}))
    spec = FlashAttentionSpec(causal=sight != "full")
    if sight in SIGHTS:
        spec = replace(spec, window=(50, None), softcap=30.0)
    if reason := PREDICATES[operation](spec, x, HOPPER):
        assert operation == "flash_attention_jvp" and "the tangent kernel takes" in reason
        assert D % 16 or V % 16 or (D != V and max(D / 192, V / 128) > 1)
        return
    for config in space(operation, x, spec, HOPPER)[: None if sight == "full" else 1]:
        text = lowered(run(operation, spec, config), *arguments(x))
        assert text.count(f"custom_call @{CUSTOM_CALL}") == kernels(operation, x)
        assert sight in SIGHTS or not re.search(r"stablehlo.pad .*high = \[[^]]*\b[1-9]\d*\]", text)


@pytest.mark.parametrize("features", range(16, 257, 8))
@pytest.mark.parametrize("widest", [32, 64])
@pytest.mark.parametrize("even", [False, True], ids=["", "even"])
def test_parts_of_a_head_dim_hold_it(even, widest, features):
    """Parts follow one another, their padding is less than a row, and only a single row is cut."""
    parts = parts_of(features, widest, even)
    widths = [part.stop - part.start for part in parts]
    assert [part.start for part in parts] == [sum(widths[:n]) for n in range(len(parts))]
    assert tile_width(features, widest, even) == sum(widths) and parts[-1].start < features <= parts[-1].stop
    assert (features % 16 == 0 and widths == [features]) or all(w <= widest and w in (16, 32, 64) for w in widths)
    assert not even or len(set(widths)) == 1


def test_every_pair_of_head_dims_has_configs_that_fit():
    for (D, V), causal in product(product(range(16, 257, 8), repeat=2), (False, True)):
        length = 16384
        x, spec = of_head_dims(D, V, length), FlashAttentionSpec(causal=causal)
        configs = space("flash_attention", x, spec, HOPPER)
        assert configs, (D, V)
        for c in configs:
            assert c.block_k in blocks_of_keys(V)
            registers = tile_width(V) / 2 + c.block_k * 3 / 4
            assert shared_bytes((c.block_q, c.block_k, c.num_stages), D, V) <= SHARED_BYTES
            assert registers <= {128: 192, 192: 128}[c.block_q], (D, V, c)
