"""Attention in the call form of ejkernel 0.0.78, as EasyDeL 0.3.0 calls it, against a formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import lax, modules
from ejkernel.modules.operations import configs
from ejkernel.types import FwdParams, MaskInfo
from tests.modules.release import HEADS, RNG, B, D, G, H, K, S, close, formula, mesh_of, qkv, random

Q_IDS = np.array([[0, 0, 1, 1, 1, -1], [-1, 0, 0, 0, 0, 0]])
KV_IDS = np.array([[0, 0, 1, 1, 1, -1, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0, 0, 0]])


def pairs(rule, queries=S, keys=S):
    return np.array([[rule(i, j) for j in range(keys)] for i in range(queries)])


def of_ids(q=Q_IDS, kv=Q_IDS):
    return ((q[:, :, None] == kv[:, None, :]) & (q >= 0)[:, :, None])[:, None]


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
    both = formula(q, k, v, visible, bias, softcap=2.0)[0]  # the bias is added before the cap
    close(jax.jit(capped)(q, k, v, bias, None, info), both)
    pairs_of_heads = MaskInfo.from_attention_mask(RNG.random((B, H, S, S)) < 0.5)
    expected = formula(q, k, v, np.asarray(pairs_of_heads.attention_mask) & np.tril(np.ones((S, S), bool)))[0]
    close(jax.jit(call)(q, k, v, None, None, pairs_of_heads), expected)


# Causality and window of a call, and which keys each query sees: from the first query and key, a window w is (w, w).
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


def test_options_in_the_mask_info_are_not_applied_twice():
    """As in Gemma 3: tokens of an image see all of the image, text is causal."""
    types = np.array([[0, 1, 1, 0, 2, 2], [0, 0, 1, 1, 1, 0]])
    info = MaskInfo.from_segments(np.zeros((B, S))).apply_causal().apply_sliding_window(3).apply_token_type_ids(types)
    q, k, v = qkv()
    alike = (types[:, :, None] == types[:, None, :]) & (types > 0)[:, :, None]
    visible = (pairs(lambda i, j: i - 3 <= j <= i) | alike)[:, None]
    found = modules.flash_attention(q, k, v, mask_info=info, causal=True, sliding_window=3)
    close(found, formula(q, k, v, visible)[0])


def test_a_step_of_decoding_over_a_cache():
    """As with EasyDeL's cache: a causal mask of the whole length, of which one row and the written keys are used."""
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


@pytest.mark.parametrize("factor", [1, 200])
def test_gradients_of_weights(factor):
    """Where logits that are masked are far above the others of their row, and where a row sees nothing."""
    q, k, v = qkv()
    q, mask = q * factor, jnp.tril(jnp.ones((S, S), bool), -1)  # the first row sees nothing

    def plain(q, k):
        s = jnp.einsum("bihd,bjhd->bhij", q, jnp.repeat(k, H // G, axis=2), precision="highest") * D**-0.5
        return (jax.nn.softmax(jnp.where(mask, s, -jnp.inf)[:, :, 1:]) ** 2).sum()

    info = MaskInfo.from_attention_mask(jnp.broadcast_to(mask, (B, 1, S, S)))
    found = lambda q, k: (modules.attention(q, k, v, mask_info=info, dtype=None)[1] ** 2).sum()
    close(found(q, k), plain(q, k), 1e-4)
    for x, expected in zip(*(jax.grad(f, (0, 1))(q, k) for f in (found, plain)), strict=True):
        close(x, expected, 1e-3)


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


def test_the_config_of_a_ring():
    """Its block sizes are those of each hop; a platform, which a ring cannot take, is refused."""
    spec = P(None, "sp", None, None)
    of_mesh = dict(mesh=mesh_of(("sp", 2)), in_specs=(spec,) * 3, out_specs=spec, axis_name="sp", causal=False)
    call = lambda **more: jax.make_jaxpr(lambda *x: modules.ring_attention(*x, mask_info=None, **of_mesh, **more))
    blocks = configs.RingAttentionConfig(fwd_params=FwdParams(64, 32))
    assert "block_q=64" in str(call(cfg=blocks)(*qkv())) and "block_q=64" not in str(call()(*qkv()))
    for more in (dict(platform="xla"), dict(cfg=configs.RingAttentionConfig(platform="triton"))):
        with pytest.raises(ValueError, match=r"platform is '(xla|triton)'; that of each hop"):
            call(**more)(*qkv())


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
