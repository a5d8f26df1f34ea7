"""The formula of flash_attention, dense and differentiated by JAX. In float64 it is the oracle of the tests."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.primitives.flash_attention import FlashAttentionSpec, Operands, Outputs


class Known(NamedTuple):
    """What follows from integers alone: visibility, the kept set of dropout, and queries that belong to a sequence."""

    visible: Any
    kept: Any
    inside: Any


def known(x: Operands, spec: FlashAttentionSpec) -> Known:
    """Computed by NumPy, so that one program of `attention` serves all operands of the same shapes."""
    inside = None
    if x.cu_seqlens_q is not None:
        inside = places(x.cu_seqlens_q, x.q.shape)[0] < x.cu_seqlens_q.shape[1] - 1
    return Known(visible(x, spec), None if x.dropout is None else kept(x, spec), inside)


def attention(x: Operands, spec: FlashAttentionSpec, facts: Known) -> Outputs:
    """o and lse in the dtype of q."""
    dtype = x.q.dtype
    group = x.q.shape[2] // x.k.shape[2]
    ok = facts.visible
    k, v = (jnp.repeat(y, group, 2) for y in (x.k, x.v))
    s = jnp.einsum("bshd,bthd->bhst", x.q, k, precision="highest") * jnp.asarray(spec.softmax_scale, dtype)
    if x.softmax_scale is not None:
        s *= x.softmax_scale.astype(dtype)[:, :, None, None]
    if x.bias is not None:
        s += x.bias.astype(dtype)
    if spec.softcap is not None:
        s = spec.softcap * jnp.tanh(s / spec.softcap)
    s = jnp.where(ok, s, -jnp.inf)
    top = s.max(-1)
    if x.sinks is not None:
        sinks = jnp.broadcast_to(x.sinks.astype(dtype), (*s.shape[:2], x.sinks.shape[2]))
        top = jnp.maximum(top, sinks.max(-1)[:, :, None])
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(s - top[..., None])
    total = weights.sum(-1)
    if x.sinks is not None:
        total += jnp.exp(sinks[:, :, None, :] - top[..., None]).sum(-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    p = weights / total[..., None]
    if facts.kept is not None:
        p = p * (facts.kept.astype(dtype) / jnp.asarray(1 - spec.dropout_rate, dtype))
    o = jnp.einsum("bhst,bthe->bshe", p, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    if facts.inside is not None:
        lse = jnp.where(facts.inside[:, None, :], lse, -jnp.inf)
    return Outputs(o, lse)


def places(cu_seqlens, shape):
    """The sequence [B, T] of each token (N: none), its index in it, and the lengths [B, N] of the sequences."""
    cu = np.broadcast_to(np.asarray(cu_seqlens), (shape[0], cu_seqlens.shape[1]))
    token = np.arange(shape[1])
    sequence = np.stack([np.searchsorted(row[1:], token, side="right") for row in cu])
    sequence = np.where(token < cu[:, :1], cu.shape[1] - 1, sequence)
    return sequence, token - np.take_along_axis(cu, sequence, 1), np.diff(cu, axis=1)


def positions(x: Operands):
    """(sequence, index in it) of queries [B, S] and keys [B, K], and K − S of each query's sequence [B, S]."""
    (B, S), K = x.q.shape[:2], x.k.shape[1]
    if x.cu_seqlens_q is None:
        i, j = (np.broadcast_to(np.arange(n), (B, n)) for n in (S, K))
        return (np.zeros_like(i), i), (np.zeros_like(j), j), np.full_like(i, K - S)
    q_sequence, i, q_lengths = places(x.cu_seqlens_q, x.q.shape)
    k_sequence, j, k_lengths = places(x.cu_seqlens_k, x.k.shape)
    shift = np.pad(k_lengths - q_lengths, ((0, 0), (0, 1)))
    k_sequence = np.where(k_sequence == k_lengths.shape[1], -1, k_sequence)
    return (q_sequence, i), (k_sequence, j), np.take_along_axis(shift, q_sequence, 1)


def visible(x: Operands, spec: FlashAttentionSpec):
    """Whether a query sees a key: bool [B, H or 1, S, K]."""
    (q_sequence, i), (k_sequence, j), shift = positions(x)
    i, j, shift = i[:, :, None], j[:, None, :], shift[:, :, None]
    ok = q_sequence[:, :, None] == k_sequence[:, None, :]
    left, right = spec.window
    if left is not None:
        ok = ok & (j >= i + shift - left)
    if right is not None:
        ok = ok & (j <= i + shift + right)
    if spec.causal:
        ok = ok & (j <= i + shift)
    if x.q_segment_ids is not None:
        q_ids, kv_ids = np.asarray(x.q_segment_ids)[:, :, None], np.asarray(x.kv_segment_ids)[:, None, :]
        ok = ok & (q_ids == kv_ids) & (q_ids >= 0)
    ok = ok[:, None]
    return ok if x.mask is None else ok & np.asarray(x.mask)


def kept(x: Operands, spec: FlashAttentionSpec):
    """Whether dropout keeps a weight: bool [B, H, S, K]."""
    (q_sequence, i), (_, j), _ = positions(x)
    key_0, key_1, batch, head, *places = (np.asarray(x.dropout)[:, :, n, None, None] for n in range(8))
    batch = batch + q_sequence[:, None, :, None].astype(np.uint32)
    i, j = places[0] + places[1] * i[:, None, :, None], places[2] + places[3] * j[:, None, None, :]
    word = philox(j, i, batch, head, key_0, key_1)
    return word >= np.uint32(min(round(spec.dropout_rate * 2**32), 2**32 - 1))


def philox(*words):
    """Word 0 of Philox-4x32-10 at a counter of four words, with a key of two (Salmon et al., 2011)."""
    low, high = np.uint64(2**32 - 1), np.uint64(32)
    c0, c1, c2, c3, k0, k1 = (np.asarray(word).astype(np.uint64) for word in words)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (second >> high) ^ c1 ^ k0, second & low, (first >> high) ^ c3 ^ k1, first & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0.astype(np.uint32)
