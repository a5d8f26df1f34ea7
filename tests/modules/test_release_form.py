"""Every operation in the form of ejkernel 0.0.78, called as EasyDeL 0.3.0 calls it, against a formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel import lax, modules, quantization
from ejkernel.modules.operations import configs
from ejkernel.types import FwdParams, MaskInfo

B, S, K, H, G, D = 2, 6, 9, 4, 2, 8
RNG = np.random.default_rng(0)
Q_IDS = np.array([[0, 0, 1, 1, 1, -1], [-1, 0, 0, 0, 0, 0]])
KV_IDS = np.array([[0, 0, 1, 1, 1, -1, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0, 0]])


def random(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def qkv(keys=S, depth=D):
    return random(B, S, H, depth), random(B, keys, G, depth), random(B, keys, G, depth)


def formula(q, k, v, visible=True, bias=0.0, sinks=None, scale=None, softcap=None):
    """(o, weights) of softmax attention in float64; rows that see nothing are 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    s = s if softcap is None else softcap * np.tanh(s / softcap)
    e = np.where(visible, np.exp(s), 0)
    total = e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None, None])
    weights = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return np.einsum("bhij,bjhd->bihd", weights, v), weights


def close(found, expected, tolerance=3e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def pairs(rule, queries=S, keys=S):
    return np.array([[rule(i, j) for j in range(keys)] for i in range(queries)])


def of_ids(q=Q_IDS, kv=Q_IDS):
    return ((q[:, :, None] == kv[:, None, :]) & (q >= 0)[:, :, None])[:, None]


def mesh_of(*sizes):
    names = ("dp", "fsdp", "ep", "tp", "sp")
    sizes = dict(zip(names, (1,) * 5, strict=True)) | dict(sizes)
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(tuple(sizes.values()), names, devices=jax.devices()[:count], axis_types=(AxisType.Auto,) * 5)


HEADS = P(("dp", "fsdp"), None, "tp", None)


# --- Dense attention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (("fsdp", 2), ("tp", 2))], ids=["one device", "four devices"])
def test_flash_attention(sizes):
    q, k, v = qkv()
    bias, sinks = random(B, H, S, S), random(H)
    call = lambda q, k, v, bias, sinks, info, **more: modules.flash_attention(
        q,
        k,
        v,
        bias,
        None,
        None,
        sinks,
        mask_info=info,
        dropout_prob=0.0,
        causal=True,
        dropout_seed=None,
        sliding_window=None,
        normalize_output=True,
        precision=jax.lax.Precision.DEFAULT,
        cfg=None,
        mesh=mesh_of(*sizes),
        in_specs=(HEADS, HEADS, HEADS, None if bias is None else P(("dp", "fsdp"), "tp"), None, None, P("tp")),
        out_specs=HEADS,
        **more,
    )
    info = MaskInfo.dynamic_init(attention_mask=Q_IDS >= 0)
    visible = of_ids(np.minimum(Q_IDS, 0), np.minimum(Q_IDS, 0)) & np.tril(np.ones((S, S), bool))
    close(jax.jit(call)(q, k, v, bias, sinks, info), formula(q, k, v, visible, bias, sinks)[0])
    close(jax.jit(call)(q, k, v, None, None, info), formula(q, k, v, visible)[0])
    capped = lambda *args: call(*args, logits_soft_cap=2.0)
    close(jax.jit(capped)(q, k, v, None, None, info), formula(q, k, v, visible, softcap=2.0)[0])
    pairs_of_heads = MaskInfo.from_attention_mask(RNG.random((B, H, S, S)) < 0.5)
    expected = formula(q, k, v, np.asarray(pairs_of_heads.attention_mask) & np.tril(np.ones((S, S), bool)))[0]
    close(jax.jit(call)(q, k, v, None, None, pairs_of_heads), expected)


# A call of causality and window, and who sees whom: from the first query and the first key, a window w is (w, w).
SEES = {
    "all": (dict(causal=False), lambda i, j: True),
    "causal": (dict(causal=True), lambda i, j: j <= i),
    "window": (dict(causal=False, sliding_window=2), lambda i, j: abs(i - j) <= 2),
    "causal window": (dict(causal=True, sliding_window=2), lambda i, j: i - 2 <= j <= i),
    "pair": (dict(causal=False, sliding_window=(3, 1)), lambda i, j: i - 3 <= j <= i + 1),
}


@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("keys", [S, K, 3])
@pytest.mark.parametrize("ids", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("operation", ["flash_attention", "scaled_dot_product_attention", "attention"])
def test_positions_are_counted_from_the_first(operation, ids, keys, sees):
    options, rule = SEES[sees]
    q, k, v = qkv(keys)
    visible = pairs(rule, S, keys)[None, None]
    info = None
    if ids:
        info = MaskInfo.from_segments(Q_IDS, KV_IDS[:, :keys])
        visible = visible & of_ids(Q_IDS, KV_IDS[:, :keys])
    more = dict(dtype=None) if operation == "attention" else {}
    found = getattr(modules, operation)(q, k, v, mask_info=info, **options, **more)
    close(found[0] if operation == "attention" else found, formula(q, k, v, visible)[0])


def test_what_is_in_the_mask_info_is_not_applied_again():
    """As Gemma 3 has it: images see all of themselves, text is causal."""
    types = np.array([[0, 1, 1, 0, 2, 2], [0, 0, 1, 1, 1, 0]])
    info = MaskInfo.from_segments(np.zeros((B, S))).apply_causal().apply_sliding_window(3).apply_token_type_ids(types)
    q, k, v = qkv()
    alike = (types[:, :, None] == types[:, None, :]) & (types > 0)[:, :, None]
    visible = (pairs(lambda i, j: i - 3 <= j <= i) | alike)[:, None]
    found = modules.flash_attention(q, k, v, mask_info=info, causal=True, sliding_window=3)
    close(found, formula(q, k, v, visible)[0])


def test_a_step_of_decoding_over_a_cache():
    """As EasyDeL's cache has it: a causal mask of the whole length, of which a row and the written keys are kept."""
    info = MaskInfo.from_segments(KV_IDS).apply_causal()
    step = info.apply_kv_lengths(jnp.array([4, 7]), q_len=1, end_index=jnp.array([4, 7]))
    q, k, v = random(B, 1, H, D), random(B, K, G, D), random(B, K, G, D)
    k = k.at[0, 4:].set(jnp.nan).at[1, 7:].set(jnp.nan)
    v = v.at[0, 4:].set(jnp.nan).at[1, 7:].set(jnp.nan)
    rows = np.array([3, 6])
    visible = of_ids(KV_IDS, KV_IDS)[np.arange(B), 0, rows] & (np.arange(K) <= rows[:, None])
    found = modules.flash_attention(q, k, v, mask_info=step, causal=False)
    close(found, formula(q, jnp.nan_to_num(k), jnp.nan_to_num(v), visible[:, None, None])[0])


def test_attention_gives_weights():
    q, k, v = qkv(K)
    bias, sinks = random(B, H, S, K), random(H)
    info = MaskInfo.from_segments(Q_IDS, KV_IDS)
    visible = of_ids(Q_IDS, KV_IDS) & pairs(lambda i, j: j <= i, S, K)
    found = modules.attention(
        q,
        k,
        v,
        bias,
        None,
        sinks,
        mask_info=info,
        deterministic=True,
        dropout_prob=0.1,
        dtype=jnp.float32,
        sliding_window=None,
        softmax_dtype=jnp.float32,
        softmax_scale=0.3,
        init_bias=None,
        causal=True,
        logits_soft_cap=None,
    )
    for x, expected in zip(found, formula(q, k, v, visible, bias, sinks, 0.3), strict=True):
        close(x, expected)
    found = modules.attention(q, k, v, mask_info=info)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 2
    close(found[0], formula(q, k, v, of_ids(Q_IDS, KV_IDS))[0], 3e-2)
    capped = modules.attention(q, k, v, mask_info=None, logits_soft_cap=1.5, dtype=None)
    for x, expected in zip(capped, formula(q, k, v, softcap=1.5), strict=True):
        close(x, expected)


def test_dropout_of_attention_takes_a_key():
    q, k, v = qkv()
    drop = lambda seed: modules.attention(
        q, k, v, None, jax.random.key(seed), mask_info=None, deterministic=False, dropout_prob=0.5, dtype=None
    )[0]
    close(drop(1), drop(1))
    assert not np.allclose(drop(1), drop(2))


def test_sinks_of_all_heads_or_of_each():
    q, k, v = qkv()
    for aux, sinks in ((random(H), lambda x: x), (random(1), lambda x: np.full(H, x)), (random(2), None)):
        each = np.log(np.exp(np.asarray(aux, np.float64)).sum()) if sinks is None else None
        expected = formula(q, k, v, sinks=np.full(H, each) if sinks is None else sinks(aux))[0]
        close(modules.flash_attention(q, k, v, None, None, None, aux, mask_info=None), expected)


def test_gradients_are_those_of_lax():
    q, k, v = qkv()
    info = MaskInfo.from_segments(Q_IDS)
    f = lambda q, k, v: (modules.flash_attention(q, k, v, mask_info=info, causal=True) ** 2).sum()
    g = lambda q, k, v: (lax.flash_attention(q, k, v, None, None, Q_IDS, Q_IDS, causal=True) ** 2).sum()
    for a, b in zip(jax.grad(f, (0, 1, 2))(q, k, v), jax.grad(g, (0, 1, 2))(q, k, v), strict=True):
        close(a, b)
    assert "f32[2,4,6,6]" not in str(jax.make_jaxpr(f)(q, k, v))


def test_packed_sequences():
    q, k, v = random(1, 12, H, D), random(1, 12, G, D), random(1, 12, G, D)
    cu = jnp.array([0, 5, 12])
    found = modules.flash_attention(q, k, v, None, cu, cu, None, mask_info=None, causal=True)
    close(found[0], lax.flash_attention(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True))


def test_scaled_dot_product_attention_of_lengths():
    q, k, v = qkv(K)
    lengths = jnp.array([3, 6]), jnp.array([5, 9])
    valid = (np.arange(S) < np.array([[3], [6]]))[:, None, :, None] & (np.arange(K) < np.array([[5], [9]]))[
        :, None, None
    ]
    found = modules.scaled_dot_product_attention(
        q, k, v, None, *lengths, mask_info=None, softmax_scale=0.5, causal=False, sliding_window=None
    )
    close(found, formula(q, k, v, valid, scale=0.5)[0])


def test_blocksparse_attention():
    q, k, v = qkv()
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    sinks = random(H)
    found = modules.blocksparse_attention(
        *turned,
        sinks,
        None,
        mask_info=MaskInfo.from_segments(Q_IDS),
        logits_soft_cap=None,
        softmax_scale=0.3,
        sliding_window=None,
        causal=True,
        fused_backward=False,
        cfg=configs.BlockSparseAttentionConfig(platform="xla"),
        mesh=mesh_of(("tp", 2)),
        out_specs=P(("dp", "fsdp"), "tp", None, None),
        in_specs=(P(("dp", "fsdp"), "tp", None, None),) * 3 + (P("tp"), P(None)),
    )
    visible = of_ids() & np.tril(np.ones((S, S), bool))
    close(found.swapaxes(1, 2), formula(q, k, v, visible, sinks=sinks, scale=0.3)[0])
    chunked = modules.blocksparse_attention(*turned, mask_info=None, chunk_size=2)
    close(chunked.swapaxes(1, 2), formula(q, k, v, pairs(lambda i, j: i // 2 == j // 2 and j <= i))[0])
    masked = modules.blocksparse_attention(*turned, attention_mask=RNG.random((B, S)) < 2, causal=False)
    close(masked.swapaxes(1, 2), formula(q, k, v)[0])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(size, causal):
    q, k, v = qkv()
    sinks, spec = random(H), P(("dp", "fsdp"), "sp", "tp", None)
    visible = of_ids() & (pairs(lambda i, j: j <= i) if causal else True)
    for info, mask in (
        (MaskInfo.from_segments(Q_IDS), visible),
        (MaskInfo.from_segments(Q_IDS).materialize_attention_mask(), visible),
        (None, np.array(pairs(lambda i, j: j <= i or not causal))),
    ):
        call = lambda q, k, v, sinks, info=info: modules.ring_attention(
            q,
            k,
            v,
            sinks,
            None,
            axis_name="sp",
            mask_info=info,
            logits_soft_cap=None,
            softmax_scale=0.4,
            sliding_window=None,
            causal=causal,
            fused_backward=False,
            cfg=None,
            mesh=mesh_of(("tp", 2), ("sp", size)),
            in_specs=(spec, spec, spec, P("tp"), None),
            out_specs=spec,
        )
        close(jax.jit(call)(q, k, v, sinks), formula(q, k, v, mask, sinks=sinks, scale=0.4)[0])


def test_ring_attention_of_a_step_of_decoding():
    q, k, v = random(B, 1, H, D), random(B, K - 1, G, D), random(B, K - 1, G, D)
    of_q, of_k = P(None, None, "tp", None), P(None, "sp", "tp", None)
    found = modules.ring_attention(
        *(q, k, v, None, None),
        axis_name="sp",
        mask_info=None,
        mesh=mesh_of(("tp", 2), ("sp", 2)),
        in_specs=(of_q, of_k, of_k, None, None),
        out_specs=of_q,
    )
    close(found, formula(q, k, v)[0])


# --- Caches -----------------------------------------------------------------------------------------------------------

N, PAGES, PAGE, MOST = 3, 12, 8, 3
CONTEXT, STARTS = jnp.array([10, 20, 0]), jnp.array([0, 4, 5, 5])
TOKENS = 6


def tables():
    return jnp.asarray(RNG.permutation(PAGES)[: N * MOST].reshape(N, MOST), jnp.int32)


def step(q, k_pages, v_pages, table, sinks=None, scale=None, window=None):
    """The formula of a step: token i of sequence n sees the keys up to context − new + i."""
    out = np.zeros(q.shape[:2] + v_pages.shape[-1:])
    for n in range(2):
        k, v = (np.asarray(x)[np.asarray(table)[n]].reshape(1, -1, *x.shape[2:]) for x in (k_pages, v_pages))
        first, last = int(STARTS[n]), int(STARTS[n + 1])
        at = int(CONTEXT[n]) - (last - first) + np.arange(last - first)
        j = np.arange(k.shape[1])
        visible = (j <= at[:, None]) & ((j > at[:, None] - window) if window else True)
        out[first:last] = formula(q[None, first:last], k, v, visible, sinks=sinks, scale=scale)[0][0]
    return out


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


def test_heads_split_over_an_axis_of_size_1_and_pages_that_are_not():
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
    """As gpt-oss has it: rows in bfloat16, matrices in float32."""
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


@pytest.mark.parametrize("sizes", ([5, 2**31 - 1, 2**31 - 1, 2**31 - 1], [2, 3, 9, 9]), ids=("32 bits", "rows"))
def test_grouped_matmul_of_sizes_beyond_the_rows(sizes):
    """They are cut off at the last row; their sum does not wrap around."""
    lhs, rhs, bias = random(12, 8), random(4, 8, 5), random(4, 1, 5)
    ends = np.minimum(np.cumsum(np.array(sizes, np.int64)), 12)
    here = np.diff(ends, prepend=0)
    added = np.asarray(bias)[np.repeat(np.arange(4), here), 0]
    product = grouped(lhs, rhs, here)
    close(modules.grouped_matmul(lhs, rhs, jnp.array(sizes, jnp.int32)), product)
    close(modules.grouped_matmul(lhs, rhs, jnp.array(sizes, jnp.int32), rhs_bias=bias), product + added)


# What EasyDeL 0.3.0 asks for on a CPU or GPU, and on a TPU in small and large batches.
HOW = {
    "default": dict(fuse=True, platform="auto", use_best_config=True),
    "small": dict(fuse=False, platform="xla", use_best_config=True),
    "large": dict(
        **dict(fuse=True, platform="pallas", use_best_config=True, tpu_path="predecode"),
        **dict(allow_dense_fallback=False, strict_fuse=True),
    ),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("of", (dict(bits=8, mode="affine", group_size=16), dict(bits=4, mode="nf4", group_size=32)))
def test_quantized_matmul(how, of):
    """As the layers of EasyDeL call it: weights [K, N] that were packed with transpose=False."""
    x, w = random(5, 24).astype(jnp.bfloat16), random(24, 64)
    codes, scales, *zeros = quantization.prepack_quantized_weights(w, **of, transpose=False)
    zeros = zeros[0] if zeros else None
    dense = np.asarray(quantization.dequantize(codes, scales, zeros, **of), np.float64)
    found = modules.operations.quantized_matmul(x, codes, scales, zeros, transpose=False, **of, **HOW[how])
    assert found.dtype == jnp.bfloat16
    close(found, np.asarray(x, np.float64) @ dense, 2e-2)
    gradient = jax.grad(lambda x: modules.quantized_matmul(x, codes, scales, zeros, **of, **HOW[how]).sum())(x)
    close(gradient, np.broadcast_to(dense.sum(1), x.shape), 2e-2)


def test_quantized_matmul_over_the_contracted_features():
    """As `axis="col"` says, which is transpose=True: weights [N, K]."""
    x, w, of = random(5, 64), random(24, 64), dict(bits=4, mode="affine", group_size=32)
    packed = quantization.quantize(w, axis="col", **of)
    dense = np.asarray(quantization.dequantize(*packed, **of), np.float64)
    for how in (dict(axis="col"), dict(transpose=True)):
        close(modules.quantized_matmul(x, *packed, **of, **how), np.asarray(x, np.float64) @ dense.T)


def test_quantized_matmul_over_a_mesh():
    """Columns over one axis and rows over the other; contracted features under shard_map, with a psum."""
    x, w, of = random(4, 24), random(24, 64), dict(bits=4, mode="nf4", group_size=32)
    codes, scales = quantization.prepack_quantized_weights(w, **of, transpose=False)
    wanted = np.asarray(x, np.float64) @ np.asarray(quantization.dequantize(codes, scales, **of), np.float64)
    mesh = mesh_of(("dp", 2), ("tp", 2))
    specs = (P("dp"), P(None, "tp"), P(None, "tp"))
    close(modules.quantized_matmul(x, codes, scales, **of, mesh=mesh, in_specs=specs, out_specs=P("dp", "tp")), wanted)
    local = lambda *a: jax.lax.psum(modules.quantized_matmul(*a, **of, fuse=True, platform="auto"), "tp")
    specs = (P(None, "tp"), P("tp"), P("tp"))
    close(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(x, codes, scales), wanted)


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
        (lambda q, k, v: modules.blocksparse_attention(q, k, v, mask_info=None, mask_builder=len), "mask_builder"),
        (lambda q, k, v: modules.unified_attention(*[q] * 6, causal=False), "causal is False"),
        (lambda q, k, v: modules.ragged_page_attention_v2(*[q] * 6, mask_value=0.0), "mask_value is 0.0"),
        (lambda q, k, v: modules.ragged_page_attention_v3(*[q] * 8, k_scale=2.0), "k_scale is 2.0"),
        (lambda q, k, v: modules.grouped_matmul(q, k, v, out_shard_callback=len), "out_shard_callback"),
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
def test_what_cannot_be_honoured_is_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*qkv())


def test_configs():
    made = configs.FlashAttentionConfig(fwd_params=FwdParams(64, 32), platform="xla")
    assert configs.FlashAttentionConfig.from_dict(made.to_dict()) == made
    assert configs.FlashAttentionConfig.from_json(made.to_json()) == made
    q, k, v = qkv()
    assert "block_q=64" in str(jax.make_jaxpr(lambda *x: modules.flash_attention(*x, cfg=made))(q, k, v))
    with pytest.raises(ValueError, match="no field blocks"):
        configs.GroupedMatmulConfig.from_dict(dict(blocks=3))


def test_the_other_calls_mean_what_they_meant():
    q, k, v = qkv(K)
    same = lambda a, b: np.testing.assert_array_equal(a, b)
    same(modules.flash_attention(q, k, v, causal=True), lax.flash_attention(q, k, v, causal=True))
    windowed = modules.flash_attention(q, k, v, sliding_window=3, causal=True)
    same(windowed, lax.flash_attention(q, k, v, window=3, causal=True))
    mask = jnp.asarray(RNG.random((S, K)) < 0.5)
    same(modules.flash_attention(q, k, v, None, mask), lax.flash_attention(q, k, v, None, mask))
