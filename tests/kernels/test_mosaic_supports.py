"""The calls and configs that flash_attention in Mosaic GPU refuses or leaves to others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.kernels._dispatch import select
from ejkernel.kernels._pallas.gpu.flash_attention import (
    LEAST_KEYS,
    LEAST_OF_PAIRS,
    flash_attention,
    flash_attention_bwd,
    flash_attention_jvp,
    supports,
    supports_bwd,
    supports_jvp,
)
from ejkernel.kernels._pallas.gpu.flash_attention.configs import (
    space,
)
from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands
from ejkernel.types import Platform, Target

from .mosaic import CALLS, CUSTOM_CALL, HOPPER, PREDICATES, SIGHTS, arguments, lowered, q, run


@pytest.mark.parametrize(
    "name, queries, block_q",
    [
        ("bert-large", 512, 128),
        ("h16-d64-full", 1024, 192),
        ("h16-d64", 1024, 128),
        ("h16-d64", 4096, 192),
        ("h16-d128-full", 1024, 128),
        ("h16-d128-full", 4096, 192),
        ("h16-d128", 4096, 128),
        ("h16-d128", 8192, 192),
        ("gemma3-27b-local", 16384, 128),
    ],
)
def test_large_tiles_pay_from_some_queries_on(name, queries, block_q):
    x, spec = CALLS[name]
    x = x._replace(
        **{field: jax.ShapeDtypeStruct((1, queries, *getattr(x, field).shape[2:]), jnp.bfloat16) for field in "qkv"}
    )
    assert space("flash_attention", x, spec, HOPPER)[0].block_q == block_q


@pytest.mark.parametrize("batch_invariant, blocks", [(False, {128, 192}), (True, {128})])
def test_tiles_of_short_rows_follow_the_batch_unless_it_may_not_matter(batch_invariant, blocks):
    """384 rows are two tiles of 192, which are faster if every multiprocessor has one."""
    found = set()
    for batch in (1, 32):
        x = Operands(*(jax.ShapeDtypeStruct((batch, 384, 16, 64), jnp.bfloat16) for _ in range(3)))
        spec = FlashAttentionSpec(batch_invariant=batch_invariant)
        found.add(space("flash_attention", x, spec, HOPPER)[0].block_q)
    assert found == blocks


def test_the_library_picks_it():
    x, spec = CALLS["llama3-8b"]
    assert select("flash_attention", spec, x, HOPPER).platform == Platform.PALLAS
    assert select("flash_attention", spec, x, Target("cuda", "NVIDIA A100-SXM4-80GB")).platform != Platform.PALLAS
    text = lowered(lambda q, k, v: ejkernel.lax.flash_attention(q, k, v, causal=True), *x[:3])
    assert CUSTOM_CALL in text


REFUSED = {
    "platform": (dict(target=Target("tpu")), "not on tpu"),
    "capability": (dict(target=Target("cuda", "NVIDIA A100-SXM4-80GB")), "capability 9.0, not 8.0"),
    "dtype": (dict(q=jax.ShapeDtypeStruct(q.shape, jnp.float32)), "q is float32"),
    "head dim": (dict(q=jax.ShapeDtypeStruct((2, 128, 4, 84), q.dtype)), "a head dim of 84"),
    "small head dim": (dict(v=jax.ShapeDtypeStruct((2, 128, 4, 8), q.dtype)), "a head dim of 8"),
    "large head dim": (dict(v=jax.ShapeDtypeStruct((2, 128, 4, 264), q.dtype)), "a head dim of 264"),
    "queries": (dict(q=jax.ShapeDtypeStruct((2, 1, 4, 64), q.dtype)), "q has a length of 1"),
    "wide bias": (dict(bias=jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float32)), "bias is float32"),
    "bias of keys": (dict(bias=jax.ShapeDtypeStruct((1, 1, 1, 128), q.dtype)), "bias is [1, 1, 1, 128]"),
    "bias of odd rows": (
        dict(
            k=jax.ShapeDtypeStruct((2, 130, 4, 64), q.dtype),
            bias=jax.ShapeDtypeStruct((1, 1, 128, 130), q.dtype),
        ),
        "a bias over 130 keys",
    ),
    "mask of keys": (dict(mask=jax.ShapeDtypeStruct((2, 1, 1, 128), jnp.bool_)), "mask is [2, 1, 1, 128]"),
    "packed mask": (
        dict(mask=jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.bool_), **SIGHTS["packed"]),
        "mask over packed sequences",
    ),
    "dropout": (
        dict(dropout=jax.ShapeDtypeStruct((2, 4, 8), jnp.uint32)),
        "dropout: its random numbers take longer than the products",
    ),
    "negative scale": (dict(spec=FlashAttentionSpec(softmax_scale=-1.0)), "softmax_scale is -1"),
    "sequences of few queries": (
        dict(
            k=jax.ShapeDtypeStruct((2, 900, 4, 64), q.dtype),
            cu_seqlens_q=jax.ShapeDtypeStruct((1, 5), jnp.int32),
        ),
        "4 sequences in 128 queries",
    ),
    "hidden first keys": (
        dict(q=jax.ShapeDtypeStruct((2, 64, 4, 64), q.dtype), window=(9, 0)),
        "some keys are masked for every query",
    ),
    "hidden last keys": (dict(window=(None, -1)), "some keys are masked for every query"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_give_a_reason(name):
    changed, reason = REFUSED[name]
    target, spec = changed.pop("target", HOPPER), changed.pop("spec", None)
    spec = spec or FlashAttentionSpec(window=changed.pop("window", (None, None)))
    assert reason in supports(spec, Operands(q, q, q)._replace(**changed), target)


def test_few_keys_are_left_to_smaller_blocks():
    """By the number of keys, or by the window."""
    few, many = (jax.ShapeDtypeStruct((2, n, 4, 64), jnp.bfloat16) for n in (LEAST_KEYS - 1, 4 * LEAST_KEYS))
    narrow = FlashAttentionSpec(causal=True, window=(127, None))
    for f in (flash_attention, flash_attention_jvp, flash_attention_bwd):
        assert "see at most 255 keys;" in f.supports(FlashAttentionSpec(), Operands(few, few, few), HOPPER)
        assert "see at most 128 keys;" in f.supports(narrow, Operands(many, many, many), HOPPER)
        assert f.supports(FlashAttentionSpec(), Operands(many, many, many), HOPPER) is None


@pytest.mark.parametrize("name, dtype", [("bias", jnp.bfloat16), ("mask", jnp.bool_)])
def test_of_calls_with_a_bias_or_a_mask_tangents_and_short_ones_are_left_to_triton(name, dtype):
    """Short ones were not measured."""

    def call(length):
        given = {name: jax.ShapeDtypeStruct((1, 1, length, length), dtype)}
        return Operands(*[jax.ShapeDtypeStruct((2, length, 4, 64), jnp.bfloat16)] * 3, **given)

    spec, x = FlashAttentionSpec(), call(LEAST_OF_PAIRS)
    assert supports_jvp(spec, x, HOPPER) == f"{name} is not taken by the tangent kernel"
    assert select("flash_attention_jvp", spec, x, HOPPER).platform == Platform.TRITON
    for primitive in ("flash_attention", "flash_attention_bwd"):
        assert select(primitive, spec, x, HOPPER).platform == Platform.PALLAS
        assert select(primitive, spec, call(LEAST_OF_PAIRS // 2), HOPPER).platform == Platform.TRITON


def test_a_scale_that_is_an_operand():
    """The tangent does not take it, nor the backward where heads that share keys have different ones."""
    of_heads = lambda heads, kv_heads, *shape: Operands(
        *(jax.ShapeDtypeStruct((2, 1024, n, 64), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)),
        softmax_scale=jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    spec = FlashAttentionSpec()
    for x in (of_heads(4, 2, 1, 1), of_heads(4, 2, 2, 1), of_heads(4, 4, 1, 4), of_heads(4, 4, 2, 4)):
        assert supports(spec, x, HOPPER) is supports_bwd(spec, x, HOPPER) is None
        assert supports_jvp(spec, x, HOPPER) == "softmax_scale is not taken by the tangent kernel"
    grouped = of_heads(4, 2, 1, 4)
    assert supports(spec, grouped, HOPPER) is None
    assert "dk is summed over query heads" in supports_bwd(spec, grouped, HOPPER)


def test_short_gradients_of_64_features_are_left_to_smaller_blocks():
    shape = lambda n, D: jax.ShapeDtypeStruct((2, n, 4, D), jnp.bfloat16)

    def left(queries, keys, D):
        x = Operands(shape(queries, D), shape(keys, D), shape(keys, D))
        return flash_attention_bwd.supports(FlashAttentionSpec(), x, HOPPER)

    assert "512 queries and 512 keys of 64 features" in left(512, 512, 64)
    assert left(1024, 512, 64) is left(512, 1024, 64) is left(512, 512, 128) is None


def test_unsupported_deterministic_gradients_give_a_reason():
    x, packed = Operands(q, q, q), Operands(q, q, q, **SIGHTS["packed"])
    spec, batch_invariant = FlashAttentionSpec(deterministic=True), FlashAttentionSpec(batch_invariant=True)
    assert supports_bwd(spec, x, HOPPER) is supports_bwd(batch_invariant, x, HOPPER) is None
    assert supports_bwd(spec, packed, HOPPER) is None
    assert "sequences before it" in supports_bwd(batch_invariant, packed, HOPPER)
    many = jax.ShapeDtypeStruct((1, 2**19, 4, 64), q.dtype)
    assert "table" in supports_bwd(spec, Operands(many, many, many, **SIGHTS["packed"]), HOPPER)


@pytest.mark.parametrize("operation", PREDICATES)
@pytest.mark.parametrize("wrong", [dict(block_q=48), dict(block_k=72), dict(num_stages=9)], ids=str)
def test_blocks_that_no_kernel_is_made_for_are_refused(wrong, operation):
    x, spec = CALLS["llama3-8b"]
    config = replace(space(operation, x, spec, HOPPER)[0], **wrong)
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{operation}: config.{name} is {value}; the Mosaic GPU kernel takes"):
        jax.eval_shape(run(operation, spec, config), *arguments(x))


def test_blocks_that_exceed_shared_memory_are_refused():
    x, spec = CALLS["h16-d256"]
    config = replace(space("flash_attention", x, spec, HOPPER)[0], block_k=128)
    with pytest.raises(ValueError, match=r"128 queries and 128 keys in 2 stages take .* bytes of shared memory"):
        jax.eval_shape(run("flash_attention", spec, config), *arguments(x))


@pytest.mark.parametrize(
    "queries, keys, causal, first",
    [(264, 264, True, "pallas"), (257, 256, True, "triton"), (1601, 1601, False, "pallas")],
)
def test_short_lengths_of_no_eights_are_left_to_triton(queries, keys, causal, first):
    """They would be copied before the kernel."""
    x = Operands(*(jax.ShapeDtypeStruct((4, n, 8, 128), jnp.bfloat16) for n in (queries, keys, keys)))
    spec = FlashAttentionSpec(causal=causal)
    for name in ("flash_attention", "flash_attention_jvp"):
        assert select(name, spec, x, HOPPER).platform == Platform(first)
