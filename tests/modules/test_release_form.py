"""The call form of ejkernel 0.0.78, as EasyDeL 0.3.0 calls it: grouped products, pooling, and unsupported arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import lax, modules
from ejkernel.modules.operations import configs
from ejkernel.types import BwdParams, FwdParams
from tests.modules.release import RNG, K, S, close, mesh_of, qkv, random

# --- Products ---------------------------------------------------------------------------------------------------------

SIZES = jnp.array([3, 0, 4, 2])


def grouped(lhs, rhs, sizes):
    ends = np.concatenate([[0], np.cumsum(np.asarray(sizes))])
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for e in range(rhs.shape[0]):
        out[ends[e] : ends[e + 1]] = np.asarray(lhs[ends[e] : ends[e + 1]], np.float64) @ np.asarray(rhs[e], np.float64)
    return out


def test_grouped_matmul():
    lhs, rhs = random(12, 8), random(4, 8, 5)
    config = modules.GroupedMatmulConfig(platform="xla", bypass_xla_tiling=True, block_m=32, block_n=32, block_k=32)
    options = dict(preferred_element_type=jnp.float32, transpose_rhs=True, platform="xla", cfg=config)
    found = modules.grouped_matmul(lhs, rhs.swapaxes(1, 2), SIZES, **options)
    close(found, grouped(lhs, rhs, SIZES))


def test_grouped_matmul_of_two_dtypes():
    """As in gpt-oss: rows in bfloat16, matrices in float32."""
    lhs, rhs = random(12, 8).astype(jnp.bfloat16), random(4, 8, 5)
    found = modules.grouped_matmul(lhs, rhs, SIZES, preferred_element_type=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    close(found, grouped(lhs, rhs, SIZES), 1e-2)
    close(modules.grouped_matmul(lhs, rhs, SIZES), grouped(lhs, rhs, SIZES))
    of_both = jax.grad(lambda a, b: modules.grouped_matmul(a, b, SIZES).sum(), (0, 1))(lhs, rhs)
    assert [x.dtype for x in of_both] == [jnp.bfloat16, jnp.float32]


def test_grouped_matmul_with_all_that_is_added():
    lhs, rhs, bias, existing = random(12, 8), random(4, 8, 5), random(4, 1, 5), random(12, 5)
    group = np.repeat(np.arange(4), SIZES)
    added = np.array(existing, np.float64)
    added[: len(group)] += np.asarray(bias)[group, 0]
    found = modules.grouped_matmul(lhs, rhs, SIZES, None, existing, rhs_bias=bias)
    close(found, grouped(lhs, rhs, SIZES) + added)
    scale = random(4, 1, 1, 5)
    scaled = np.asarray(rhs) * np.asarray(scale)[:, 0]
    close(modules.grouped_matmul(lhs, rhs, SIZES, rhs_scale=scale), grouped(lhs, scaled, SIZES))
    found = jax.jit(lambda offset: modules.grouped_matmul(lhs[3:], rhs[1:3], SIZES, offset))(jnp.int32(1))
    close(found, grouped(lhs[3:], rhs[1:3], SIZES[1:3]))


def test_grouped_matmul_from_an_offset_at_the_last_groups():
    """Matrices for which there is no group have no rows; here there were the rows of the group before."""
    lhs, rhs = random(12, 8), random(2, 8, 5)
    for call in (modules.grouped_matmul, jax.jit(modules.grouped_matmul)):
        close(call(lhs, rhs, SIZES, jnp.int32(3)), grouped(lhs, rhs, [2, 0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (dict(rhs_bias=random(3, 1, 5)), r"rhs_bias must be \[4, 1, 5\] or \[4, 5\]"),
        (dict(rhs_bias=random(4, 1, 1)), r"rhs_bias must be \[4, 1, 5\] or \[4, 5\]"),
        (dict(use_v2=True, existing_out=random(5)), r"existing_out must be \[12, 5\]"),
        (dict(use_v2=True, group_offset=-1), "group_offset is -1"),
        (dict(use_v2=True, group_offset=jnp.array([0, 1])), "group_offset must be a scalar"),
        (dict(rhs_bias=random(4, 5), preferred_element_type=jnp.int32), "preferred_element_type is int32"),
    ),
    ids=("a bias too few", "one column", "one row", "before the first", "two offsets", "ints"),
)
def test_grouped_matmul_refuses_what_would_be_broadcast_or_clipped(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        modules.grouped_matmul(random(12, 8), random(4, 8, 5), SIZES, **arguments)


@pytest.mark.parametrize("sizes", ([5, 2**31 - 1, 2**31 - 1, 2**31 - 1], [2, 3, 9, 9]), ids=("32 bits", "rows"))
def test_grouped_matmul_of_sizes_beyond_the_rows(sizes):
    """They are clipped at the last row; their sum does not overflow."""
    lhs, rhs, bias = random(12, 8), random(4, 8, 5), random(4, 1, 5)
    ends = np.minimum(np.cumsum(np.array(sizes, np.int64)), 12)
    here = np.diff(ends, prepend=0)
    added = np.asarray(bias)[np.repeat(np.arange(4), here), 0]
    product = grouped(lhs, rhs, here)
    close(modules.grouped_matmul(lhs, rhs, jnp.array(sizes, jnp.int32)), product)
    close(modules.grouped_matmul(lhs, rhs, jnp.array(sizes, jnp.int32), rhs_bias=bias), product + added)


def test_mean_pooling_of_heads():
    x = random(2, 7, 3, 8)
    close(modules.mean_pooling(x), np.asarray(x, np.float64).mean(1))
    spec = P("tp")
    close(modules.mean_pooling(x, mesh=mesh_of(("tp", 2)), in_specs=(spec,), out_specs=spec), np.asarray(x).mean(1))


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k, v: modules.flash_attention(q, k, v, mask_info=None, normalize_output=False), "normalize_output"),
        (lambda q, k, v: modules.flash_attention(q, k, v, mask_info=None, precision="highest"), "precision is"),
        (lambda q, k, v: modules.flash_attention(q, k, v, mask_info=None, sliding=3), "unexpected keyword argument"),
        (lambda q, k, v: modules.flash_attention(q, k, mask_info=None), "missing a required argument: 'v'"),
        (lambda q, k, v: modules.flash_attention(q, k, v, mask_info=None, platform="tilelang"), "is unknown"),
        (lambda q, k, v: modules.flash_attention(q, k, v, mask_info=None, sliding_window="x"), "sliding_window is"),
        (lambda q, k, v: modules.attention(q, k, v, q, mask_info=None, logits_soft_cap=1.0), "after the cap"),
        (
            lambda q, k, v: modules.ring_attention(q, k, v, None, q, mask_info=None, logits_soft_cap=1.0),
            "after the cap",
        ),
        (lambda q, k, v: modules.blocksparse_attention(q, k, v, mask_info=None, mask_builder=len), "mask_builder"),
        (lambda q, k, v: modules.unified_attention(*[q] * 6, causal=False), "causal is False"),
        (lambda q, k, v: modules.ragged_page_attention_v2(*[q] * 6, mask_value=0.0), "mask_value is 0.0"),
        (lambda q, k, v: modules.ragged_page_attention_v3(*[q] * 8, k_scale=2.0), "k_scale is 2.0"),
        (lambda q, k, v: modules.grouped_matmul(q, k, v, out_shard_callback=len), "out_shard_callback"),
        (lambda q, k, v: modules.grouped_matmul(q, k, v, use_v2=True, use_v3=True), "mutually exclusive"),
        (
            lambda q, k, v: modules.flash_attention(
                q, k, v, cfg=configs.FlashAttentionConfig(bwd_params=BwdParams(32, 32))
            ),
            "bwd_params but no fwd_params",
        ),
        (lambda q, k, v: modules.quantized_matmul(q, k, v, axis="both"), "axis is 'both'"),
        (lambda q, k, v: modules.quantized_matmul(q, k, v, fuse=None), "fuse is None; it must be True or False"),
        (lambda q, k, v: modules.quantized_matmul(q, k, v, fuse=False, strict_fuse=True), "it needs fuse"),
        (
            lambda q, k, v: modules.quantized_matmul(q, k, v, strict_fuse=True, allow_dense_fallback=True),
            "one excludes the other",
        ),
        (lambda q, k, v: modules.quantized_matmul(q, k, v, tpu_path="dense"), "tpu_path is 'dense'"),
    ],
)
def test_unsupported_arguments_are_errors(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*qkv())


def test_gates_that_do_not_fit():
    """They, or the result, would be broadcast to the shape of both."""
    x, B, A, dt = random(1, 5, 4, 3), random(1, 5, 2, 6), -jnp.ones(4), jnp.ones((1, 5, 4))
    second = lambda **gated: modules.state_space_v2(x, A, B, B, jnp.ones(4), dt, **gated)
    for shape in ((2, 5, 12), (12,), (1, 5, 4, 3)):
        with pytest.raises(ValueError, match=r"state_space_v2: gate must be \[1, 5, 12\], as the result"):
            second(gate=random(*shape))
    with pytest.raises(ValueError, match="use_gated_rmsnorm is True but there is no gate"):
        second(gate=None, use_gated_rmsnorm=True)
    x, B = random(1, 5, 8), random(1, 5, 4)
    with pytest.raises(ValueError, match=r"state_space_v1: gate must be \[1, 5, 8\], as the result"):
        modules.state_space_v1(x, -jnp.ones((8, 4)), B, B, jnp.ones(8), jnp.ones((1, 5, 8)), gate=x[:, :1])


def test_configs():
    made = configs.FlashAttentionConfig(fwd_params=FwdParams(64, 32), platform="xla")
    assert configs.FlashAttentionConfig.from_dict(made.to_dict()) == made
    assert configs.FlashAttentionConfig.from_json(made.to_json()) == made
    q, k, v = qkv()
    assert "block_q=64" in str(jax.make_jaxpr(lambda *x: modules.flash_attention(*x, cfg=made))(q, k, v))
    with pytest.raises(ValueError, match="no field blocks"):
        configs.GroupedMatmulConfig.from_dict(dict(blocks=3))


def test_other_calls_keep_their_meaning():
    q, k, v = qkv(K)
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    same(modules.flash_attention(q, k, v, causal=True), lax.flash_attention(q, k, v, causal=True))
    windowed = modules.flash_attention(q, k, v, sliding_window=3, causal=True)
    same(windowed, lax.flash_attention(q, k, v, window=3, causal=True))
    mask = jnp.asarray(RNG.random((S, K)) < 0.5)
    same(modules.flash_attention(q, k, v, None, mask), lax.flash_attention(q, k, v, None, mask))


def test_a_ring_in_the_form_of_this_library_takes_options_by_their_names_in_the_modules_api():
    q, k, v = qkv()
    sinks = random(q.shape[2])
    over = lambda **how: jax.shard_map(
        lambda q, k, v: modules.ring_attention(q, k, v, axis_name="x", layout="contiguous", **how),
        mesh=jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]),
        in_specs=(P(None, "x"),) * 3,
        out_specs=P(None, "x"),
    )(q, k, v)
    named = over(softmax_aux=sinks, logits_soft_cap=2.0, cfg=dict(platform="xla"))
    close(named, over(sinks=sinks, softcap=2.0, config=dict(platform="xla")))
    with pytest.raises(TypeError, match="softmax_aux and sinks are given"):
        over(softmax_aux=sinks, sinks=sinks)
    with pytest.raises(ValueError, match="logits_soft_cap is -1"):
        over(logits_soft_cap=-1.0)
