"""Paged attention in the call form of ejkernel 0.0.78, as EasyDeL 0.3.0 calls it, against a formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.modules.operations import configs
from ejkernel.types import MaskInfo
from tests.modules.release import CONTEXT, HEADS, RNG, STARTS, B, D, G, H, K, close, formula, mesh_of, random, step

pytestmark = pytest.mark.usefixtures("release_types")

N, PAGES, PAGE, MOST = 3, 12, 8, 3
TOKENS = 6


def tables():
    return jnp.asarray(RNG.permutation(PAGES)[: N * MOST].reshape(N, MOST), jnp.int32)


def test_ragged_decode_attention():
    q, k, v = random(B, H, D), random(B, K, G, D), random(B, K, G, D)
    starts, ends, sinks = jnp.array([0, 2]), jnp.array([4, 9]), random(H)
    call = lambda *arrays, in_specs: modules.ragged_decode_attention(
        *arrays,
        softmax_scale=0.3,
        sliding_window=(3, 3),
        logits_soft_cap=None,
        mesh=mesh_of(("tp", 2)),
        in_specs=in_specs,
        out_specs=P(("dp", "fsdp"), "tp", None),
    )
    j = np.arange(K)
    visible = (j >= np.array([[0], [5]])) & (j < np.array([[4], [9]]))
    specs = (P(("dp", "fsdp"), "tp", None), HEADS, HEADS, P(("dp", "fsdp")), P(("dp", "fsdp")))
    expected = formula(q[:, None], k, v, visible[:, None, None], sinks=sinks, scale=0.3)[0]
    close(call(q, k, v, starts, ends, sinks, in_specs=(*specs, P("tp"))), expected[:, 0])
    expected = formula(q[:, None], k, v, visible[:, None, None], scale=0.3)[0]
    close(call(q, k, v, starts, ends, None, in_specs=(*specs, None)), expected[:, 0])
    one = modules.ragged_decode_attention(q[:, None], k, v, starts, ends, softmax_scale=0.3, sliding_window=(3, 3))
    close(one, expected)
    options = dict(softmax_scale=0.3, sliding_window=(3, 3), return_lse=True)
    o, lse = modules.ragged_decode_attention(q[:, None], k, v, starts, ends, **options)
    close(o, expected)
    split = dict(mesh=mesh_of(("tp", 2)), in_specs=(HEADS, *specs[1:]), out_specs=(HEADS, P(("dp", "fsdp"), "tp")))
    of_mesh = modules.ragged_decode_attention(q[:, None], k, v, starts, ends, **options, **split)
    close(of_mesh[0], o), close(of_mesh[1], lse)


def test_ragged_page_attention_v2():
    q, pages, table = random(TOKENS, H, D), random(PAGES, PAGE, 2 * G, D), tables()
    sinks = random(H)
    call = lambda q, pages, table, sinks: modules.ragged_page_attention_v2(
        q,
        pages,
        CONTEXT,
        table,
        STARTS,
        jnp.array([2]),
        sinks,
        softmax_scale=0.3,
        logits_soft_cap=None,
        vmem_limit_bytes=None,
        optimized=False,
        compute_dtype=jnp.bfloat16,
        mask_value=-0.7 * float(np.finfo(np.float32).max),
        sliding_window=7,
        cfg=configs.RaggedPageAttentionv2Config(num_kv_pages_per_block=4),
        platform="auto",
        in_specs=(P(None, "tp", None), P(None, None, "tp", None), P(), P(), P(), P(), P(None)),
        out_specs=P(None, "tp", None),
        mesh=mesh_of(("tp", 2)),
    )
    k, v = pages[:, :, ::2], pages[:, :, 1::2]
    close(jax.jit(call)(q, pages, table, sinks), step(q, k, v, table, sinks, 0.3, window=7))


@pytest.mark.parametrize("packed", [False, True], ids=["heads", "packed heads"])
def test_ragged_page_attention_v3(packed):
    q, k, v, table = random(TOKENS, H, D), random(TOKENS, G, D), random(TOKENS, G, D), tables()
    wide = 16 if packed else D
    pool = jnp.asarray(RNG.standard_normal((PAGES, PAGE, 2 * G, wide)), jnp.float32).at[..., D:].set(0)
    shaped = pool.reshape(PAGES, PAGE, G, 2, wide) if packed else pool
    specs = P(None, None, "tp", *(None,) * (shaped.ndim - 3))
    call = lambda q, k, v, pool, table: modules.ragged_page_attention_v3(
        q,
        k,
        v,
        pool,
        CONTEXT,
        table.reshape(-1),
        STARTS,
        jnp.array([1, 1, 2]),
        None,
        softmax_scale=0.3,
        logits_soft_cap=None,
        vmem_limit_bytes=None,
        sliding_window=None,
        cfg=configs.RaggedPageAttentionv3Config(num_kv_pages_per_block=8),
        platform="auto",
        in_specs=(P(None, "tp"), P(None, "tp"), P(None, "tp"), specs, P(), P(), P(), P(), None),
        out_specs=(P(None, "tp"), specs),
        mesh=mesh_of(("tp", 2)),
    )
    found, new = jax.jit(call)(q, k, v, shaped, table)
    expected = np.array(pool)
    for n in range(2):
        for i in range(int(STARTS[n]), int(STARTS[n + 1])):
            p = int(CONTEXT[n] - STARTS[n + 1]) + i
            both = np.stack([k[i], v[i]], 1).reshape(2 * G, D)
            expected[int(table[n, p // PAGE]), p % PAGE, :, :D] = both
    np.testing.assert_array_equal(new, expected.reshape(shaped.shape))
    expected = expected[..., :D]
    close(found, step(q, expected[:, :, ::2], expected[:, :, 1::2], table, scale=0.3))


def test_heads_split_over_an_axis_of_size_1_and_unsharded_pages():
    q, k, v, table = random(TOKENS, H, D), random(TOKENS, G, D), random(TOKENS, G, D), tables()
    pool, whole, heads = random(PAGES, PAGE, G, 2, D), P(None, None, None, None, None), P(None, "tp", None)
    call = lambda pool, **mesh: modules.ragged_page_attention_v3(
        q, k, v, pool, CONTEXT, table.reshape(-1), STARTS, jnp.array([1, 1, 2]), None, **mesh
    )
    of_mesh = dict(mesh=mesh_of(), out_specs=(heads, whole))
    in_specs = (heads, heads, heads, whole, P(), P(), P(), P(), None)
    jax.tree.map(np.testing.assert_array_equal, call(pool, in_specs=in_specs, **of_mesh), call(pool))


def test_the_scale_of_ragged_page_attention_v3_is_one_if_left_out():
    q, k, v, table, pool = (
        random(TOKENS, H, D),
        random(TOKENS, G, D),
        random(TOKENS, G, D),
        tables(),
        random(PAGES, PAGE, 2 * G, D),
    )
    call = lambda table, count, **scale: modules.ragged_page_attention_v3(
        q, k, v, pool, CONTEXT, table, STARTS, count, **scale
    )[0]
    close(call(table.reshape(-1), jnp.array([0, 0, 2])), call(table, 2, softmax_scale=1.0))
    close(call(table.reshape(-1), jnp.array([0, 0, 2]), softmax_scale=None), call(table, 2))


@pytest.mark.parametrize("columns", [MOST, 5], ids=["some of the pool", "all of it"])
def test_unified_attention(columns):
    q, keys, values = random(TOKENS, H, D), random(PAGES, PAGE, G, D), random(PAGES, PAGE, G, D)
    sinks, table = random(H), jnp.asarray(RNG.integers(0, PAGES, (N, columns)), jnp.int32)
    found = modules.unified_attention(
        q,
        keys,
        values,
        CONTEXT,
        table,
        STARTS,
        None,
        None,
        sinks,
        softmax_scale=0.3,
        causal=True,
        sliding_window=None,
        logits_soft_cap=None,
        platform="xla",
        cfg=modules.UnifiedAttentionConfig(num_warps=8, num_stages=2, num_par_softmax_segments=4, seq_threshold_3d=64),
        in_specs=(P(None, "tp"), P(None, None, "tp"), P(None, None, "tp"), P(), P(), P(), None, None, P("tp")),
        out_specs=P(None, "tp"),
        mesh=mesh_of(("tp", 2)),
    )
    close(found, step(q, keys, values, table, sinks, 0.3))


@pytest.mark.parametrize("name", ["multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2"])
@pytest.mark.parametrize("packed", [False, True], ids=["exact", "padded"])
def test_multi_latent_ragged_page_attention(name, packed):
    depth, rotary = 16, 4
    q, q_rope, c, r = random(TOKENS, H, depth), random(TOKENS, H, rotary), random(TOKENS, depth), random(TOKENS, rotary)
    table = tables()
    shape = (PAGES, PAGE // 2, 2, 256) if packed else (PAGES, PAGE, depth + rotary)
    pool = np.zeros((PAGES, PAGE, shape[-1]), np.float32)
    at_rope = 128 if packed else depth
    pool[..., :depth], pool[..., at_rope : at_rope + rotary] = random(PAGES, PAGE, depth), random(PAGES, PAGE, rotary)
    config = configs.MultiLatentRaggedPageAttentionConfig(num_kv_pages_per_block=2, platform="auto")
    call = lambda *arrays: getattr(modules, name)(
        *arrays,
        softmax_scale=None,
        logits_soft_cap=None,
        sliding_window=None,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        mask_value=-0.7 * float(np.finfo(np.float32).max),
        cfg=config,
    )
    given = (
        q,
        q_rope,
        c,
        r,
        jnp.asarray(pool).reshape(shape),
        CONTEXT,
        table.reshape(-1),
        STARTS,
        jnp.array([0, 0, 2]),
    )
    found, new = jax.jit(call)(*given)
    for n in range(2):
        for i in range(int(STARTS[n]), int(STARTS[n + 1])):
            p = int(CONTEXT[n] - STARTS[n + 1]) + i
            slot = pool[int(table[n, p // PAGE]), p % PAGE]
            slot[:depth], slot[at_rope : at_rope + rotary] = c[i], r[i]
    np.testing.assert_array_equal(new, pool.reshape(shape))
    keys = np.concatenate([pool[..., :depth], pool[..., at_rope : at_rope + rotary]], -1)[:, :, None]
    expected = step(
        jnp.concatenate([q, q_rope], -1), keys, pool[:, :, None, :depth], table, scale=(depth + rotary) ** -0.5
    )
    close(found, expected)


def test_flash_attention_of_pages():
    q, keys, values = random(B, 1, H, D), random(PAGES, PAGE, G, D), random(PAGES, PAGE, G, D)
    table = tables()[:B]
    valid = np.arange(MOST * PAGE) < np.array([[5], [20]])
    found = modules.flash_attention(
        *(q, keys, values, None, None, None, None, table),
        mask_info=MaskInfo(_attention_mask=jnp.asarray(valid)[:, None, None]),
        softmax_scale=0.3,
        dropout_prob=0.0,
        causal=False,
        logits_dtype=jnp.bfloat16,
        mesh=mesh_of(("tp", 2)),
        in_specs=(HEADS, P(None, None, "tp"), P(None, None, "tp"), None, None, None, None),
        out_specs=HEADS,
    )
    k, v = (np.asarray(x)[np.asarray(table)].reshape(B, -1, G, D) for x in (keys, values))
    close(found, formula(q, k, v, valid[:, None, None], scale=0.3)[0])
