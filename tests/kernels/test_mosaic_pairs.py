"""A bias and a mask in flash_attention on Mosaic GPU: the words of a mask, and kernels for every head dim and band."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._pallas.gpu.flash_attention import flash_attention_bwd, supports, supports_bwd
from ejkernel.kernels._pallas.gpu.flash_attention.backward_plan import Plan as Backward
from ejkernel.kernels._pallas.gpu.flash_attention.configs import SHARED_BYTES, shared_bytes, space
from ejkernel.kernels._pallas.gpu.flash_attention.pairs import pairs_of, pairs_of_keys
from ejkernel.kernels._pallas.gpu.flash_attention.plan import Plan
from ejkernel.kernels._pallas.gpu.flash_attention.problem import problem_of
from ejkernel.kernels._visibility import visibility_of
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs

from .mosaic import CUSTOM_CALL, HOPPER, SIGHTS, arguments, kernels, lowered, q, run


def of_pairs(D: int, V: int, queries: int, keys: int, **shapes: tuple[int, int]) -> Operands:
    """Shapes of a call; `shapes` are the batch and the heads of the bias and the mask."""
    sized = lambda n, heads, width: jax.ShapeDtypeStruct((2, n, heads, width), jnp.bfloat16)
    dtypes = dict(bias=jnp.bfloat16, mask=jnp.bool_)
    given = {name: jax.ShapeDtypeStruct((*shape, queries, keys), dtypes[name]) for name, shape in shapes.items()}
    return Operands(sized(queries, 4, D), sized(keys, 2, D), sized(keys, 2, V), **given)


@pytest.mark.parametrize("block_q", [128, 192])
@pytest.mark.parametrize("S, K", [(128, 128), (77, 300), (200, 61)])
def test_words_of_a_mask(S, K, block_q):
    """One bit a key, 0 up to the ends of the last tiles."""
    mask = np.random.default_rng(0).random((2, 3, S, K)) < 0.5
    x = of_pairs(64, 64, S, K)._replace(mask=jnp.asarray(mask))
    plan = Plan(problem_of(x, FlashAttentionSpec()), block_q, 64, 3, mask=True, processors=132)
    words = np.asarray(pairs_of(x, plan).bits).view(np.uint32)
    rows, keys = -(-S // block_q) * block_q, -(-K // 64) * 64
    assert words.shape == (2, 3, keys // 32, rows)
    bits = (words.swapaxes(2, 3)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    expected = np.pad(mask, ((0, 0), (0, 0), (0, rows - S), (0, keys - K)))
    np.testing.assert_array_equal(bits.reshape(2, 3, rows, keys).astype(bool), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S, K", [(128, 128), (77, 300), (200, 61)])
def test_words_of_a_transposed_mask(S, K, causal):
    """One bit a query, 0 up to the ends of the last tiles, and where causality hides the pair."""
    mask = np.random.default_rng(0).random((2, 3, S, K)) < 0.5
    rows, keys = -(-S // 64) * 64, -(-K // 128) * 128
    x, spec = of_pairs(64, 64, S, K)._replace(mask=jnp.asarray(mask)), FlashAttentionSpec(causal=causal)
    words = np.asarray(pairs_of_keys(x, visibility_of(x, spec), rows, keys).bits).view(np.uint32)
    mask &= np.tri(S, K, K - S, dtype=bool) if causal else True
    assert words.shape == (2, 3, rows // 32, keys)
    bits = (words[:, :, :, None] >> np.arange(32, dtype=np.uint32)[:, None]) & 1
    expected = np.pad(mask, ((0, 0), (0, 0), (0, rows - S), (0, keys - K)))
    np.testing.assert_array_equal(bits.reshape(2, 3, rows, keys).astype(bool), expected)


GIVEN = {
    "bias": dict(bias=(1, 4)),
    "bias of a batch": dict(bias=(2, 1)),
    "mask": dict(mask=(2, 1)),
    "mask of heads": dict(mask=(1, 4)),
    "bias, mask": dict(bias=(2, 4), mask=(1, 1)),
}


SLOW = (64, 64), (72, 72), (192, 128), (256, 256)
SIZES = [(128, 128), *(pytest.param(*size, marks=pytest.mark.slow) for size in SLOW)]


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("D, V", SIZES)
def test_a_bias_and_a_mask_lower(D, V, given):
    """By every config, at lengths that end in a tile of 64 keys."""
    for causal in (False, True):
        x, spec = of_pairs(D, V, 600, 712, **GIVEN[given]), FlashAttentionSpec(causal=causal)
        assert supports(spec, x, HOPPER) is None
        for config in space("flash_attention", x, spec, HOPPER):
            text = lowered(run("flash_attention", spec, config), *arguments(x))
            assert text.count(f"custom_call @{CUSTOM_CALL}") == 1


def test_a_bias_and_a_mask_lower_with_segments_a_window_and_a_softcap():
    x = of_pairs(64, 64, 128, 128, bias=(1, 4), mask=(2, 1))._replace(**SIGHTS["segments"])
    spec = FlashAttentionSpec(causal=True, window=(50, None), softcap=30.0)
    assert supports(spec, x, HOPPER) is None and x.q.shape == q.shape
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    assert CUSTOM_CALL in lowered(run("flash_attention", spec, config), *arguments(x))


OF_MASKS = {
    "full": FlashAttentionSpec(),
    "causal": FlashAttentionSpec(causal=True),
    "window and softcap": FlashAttentionSpec(causal=True, window=(50, None), softcap=30.0),
    "deterministic": FlashAttentionSpec(deterministic=True),
}


QUICK = [*(("bias, mask", options) for options in OF_MASKS), ("mask", "causal"), ("bias", "causal")]
BACKWARDS = [
    pytest.param(D, V, given, options, marks=[] if D == 128 and (given, options) in QUICK else [pytest.mark.slow])
    for D, V in ((128, 128), *SLOW, (160, 160))
    for given in GIVEN
    for options in OF_MASKS
]


@pytest.mark.parametrize("D, V, given, options", BACKWARDS)
def test_the_backward_lowers(D, V, given, options):
    """By every config, at lengths that end within tiles; with segments under a window."""
    x, spec = of_pairs(D, V, 600, 712, **GIVEN[given]), OF_MASKS[options]
    if spec.softcap is not None:
        ids = (jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (600, 712))
        x = x._replace(**dict(zip(("q_segment_ids", "kv_segment_ids"), ids, strict=True)))
    assert supports_bwd(spec, x, HOPPER) is None
    for config in space("flash_attention_bwd", x, spec, HOPPER):
        text = lowered(run("flash_attention_bwd", spec, config), *arguments(x))
        assert text.count(f"custom_call @{CUSTOM_CALL}") == kernels("flash_attention_bwd", x)


def test_the_gradient_of_a_bias_is_computed_where_it_is_asked_for():
    """ds [b, h, K, S] goes to device memory only then."""
    x, spec = of_pairs(128, 128, 600, 712, bias=(1, 4)), FlashAttentionSpec()
    (config, *_) = space("flash_attention_bwd", x, spec, HOPPER)
    x, outputs, do = arguments(x)
    gradients = lambda wrt: (
        lambda x, outputs, do: flash_attention_bwd(x, outputs, Outputs(do, None), wrt=wrt, spec=spec, config=config)
    )
    ds = "tensor<2x4x712x640xbf16>"
    assert ds in lowered(gradients(("bias",)), x, outputs, do)
    assert ds not in lowered(gradients(("q", "k", "v")), x, outputs, do)


def test_the_backward_of_every_pair_of_head_dims_fits_beside_a_bias():
    for D in range(16, 257, 8):
        for V in range(16, 257, 8):
            x, spec = of_pairs(D, V, 16384, 16384, bias=(1, 1)), FlashAttentionSpec()
            configs = space("flash_attention_bwd", x, spec, HOPPER)
            assert configs, (D, V)
            for c in configs:
                plan = Backward(problem_of(x, spec), c.block_q, c.num_stages, bias=True, processors=132)
                assert plan.keys == c.block_k and plan.shared_bytes(plan.ds_stages) <= SHARED_BYTES


def test_a_backward_that_exceeds_shared_memory_is_refused():
    x, spec = of_pairs(256, 256, 600, 712, bias=(1, 4)), FlashAttentionSpec()
    (config, *_) = space("flash_attention_bwd", x, spec, HOPPER)
    assert config.num_stages == 1
    with pytest.raises(ValueError, match=r"64 queries and 64 keys in 2 stages take .* bytes of shared memory"):
        jax.eval_shape(run("flash_attention_bwd", spec, replace(config, num_stages=2)), *arguments(x))


def test_every_pair_of_head_dims_has_configs_that_fit_beside_a_bias():
    for D in range(16, 257, 8):
        for V in range(16, 257, 8):
            x = of_pairs(D, V, 16384, 16384, bias=(1, 1))
            configs = space("flash_attention", x, FlashAttentionSpec(), HOPPER)
            assert configs, (D, V)
            for c in configs:
                assert c.block_k == 64 and shared_bytes((c.block_q, 64, c.num_stages), D, V, bias=True) <= SHARED_BYTES


def test_rounding_to_eight_bits_is_left_out_beside_a_bias():
    x, spec = of_pairs(128, 128, 1024, 1024, bias=(1, 1)), FlashAttentionSpec(precision="e4m3")
    (config, *_) = space("flash_attention", x, spec, HOPPER)
    assert "f8E4M3FN" not in lowered(run("flash_attention", spec, config), *arguments(x))
