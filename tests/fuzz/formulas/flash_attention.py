"""softmax(scale·q·kᵀ + bias, masked)·v and the logsumexp of its rows, with all the logits at once."""

import jax
import jax.numpy as jnp
import numpy as np


def formula(x, facts, options, rounded):
    """o and lse."""
    q, k, v = (a if a.ndim == 4 else a[None] for a in (x["q"], x["k"], x["v"]))
    packed, cap, scale = x["q"].ndim == 3, options.get("softcap"), options.get("softmax_scale")
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest")
    s = rounded(s) * x.get("softmax_scale", q.shape[-1] ** -0.5 if scale is None else scale)
    s = s + x.get("bias", 0)
    s = s if cap is None else cap * jnp.tanh(s / cap)
    if "no_bias" in facts:  # where the bias is −∞, which must not be multiplied by 0
        s = jnp.where(facts["no_bias"], -jnp.inf if cap is None else -cap, s)
    s = jnp.where(facts["visible"], s, -jnp.inf)
    sinks = x["sinks"].reshape(1, q.shape[2], 1, -1) if "sinks" in x else jnp.full((1, 1, 1, 1), -jnp.inf, s.dtype)
    if "no_sink" in facts:
        sinks = jnp.where(facts["no_sink"].reshape(sinks.shape), -jnp.inf, sinks)
    top = jnp.maximum(s.max(-1, initial=-jnp.inf), sinks.max(-1))
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))[..., None]
    weights = jnp.exp(s - top)
    total = weights.sum(-1) + jnp.exp(sinks - top).sum(-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    p = weights / total[..., None]
    if "kept" in facts:
        p = jnp.where(facts["kept"], p / (1 - options["dropout_rate"]), 0)
    of_weights = lambda p: jnp.einsum("bhst,bthe->bshe", p, v, precision="highest")
    o, exact, row_sum = rounded(of_weights(rounded(p))), of_weights(p), jnp.log(total)
    # ds = p∘(dp − δ) with δ = Σ do∘o of the o that was kept, which is rounded: p is the derivative of lse.
    o = o + (row_sum - jax.lax.stop_gradient(row_sum)).swapaxes(1, 2)[..., None] * jax.lax.stop_gradient(exact - o)
    lse = jnp.where(empty, -jnp.inf, top[..., 0] + row_sum)
    if "inside" in facts:
        lse = jnp.where(facts["inside"], lse, -jnp.inf)
    results = [o, lse] if options.get("return_lse") else [o]
    return [a[0] for a in results] if packed else results


def visible(S, K, options, ids=None, cuts=None, mask=None):
    """Whether a query sees a key: bool [B or 1, H or 1, S, K]; cuts are cu_seqlens of queries and keys."""
    (n_i, i, _), (n_j, j, _) = q, k = [
        (np.zeros(n, int), np.arange(n), np.array([n])) if cuts is None else places(cut, n)
        for n, cut in zip((S, K), cuts or (None, None), strict=True)
    ]
    shift = np.append(k[2] - q[2], 0)[n_i]
    distance = j[None] - (i + shift)[:, None]
    ok = (n_i[:, None] == n_j[None]) & (n_i[:, None] >= 0)
    window = options.get("window")
    left, right = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    ok = ok & (True if left is None else distance >= -left) & (True if right is None else distance <= right)
    ok = (ok & (distance <= 0) if options.get("causal") else ok)[None, None]
    if ids is not None:
        q_ids, kv_ids = (np.asarray(a, np.int64) for a in ids)
        ok = ok & ((q_ids[:, :, None] == kv_ids[:, None]) & (q_ids[:, :, None] >= 0))[:, None]
    return ok if mask is None else ok & mask


def places(cuts, tokens):
    """For each token the number of its sequence (−1: none) and its place in it; the lengths of the sequences."""
    token, cuts = np.arange(tokens), np.asarray(cuts, np.int64)
    number = np.searchsorted(cuts[1:], token, side="right")
    number = np.where((token >= cuts[0]) & (token < cuts[-1]), number, -1)
    return number, token - cuts[number], np.diff(cuts)


def kept(seed, shape, rate, cuts=None):
    """Whether dropout keeps a weight [B, H, S, K]: a word of Philox at (j, i, h, b), which in a packed call counts
    sequences and places in them, is at least rate·2³².
    """
    B, H, S, K = shape
    n, i, j = np.zeros(S, int), np.arange(S), np.arange(K)
    if cuts is not None:
        (n, i, _), (_, j, _) = places(cuts[0], S), places(cuts[1], K)
    words = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
    batch = np.arange(B)[:, None, None, None] + np.maximum(n, 0)[:, None]
    word = philox(j, i[:, None], batch, np.arange(H)[:, None, None], *words)
    return word >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def philox(*words):
    """The first word of Philox-4x32-10, from a counter of four words and a key of two (Salmon et al., 2011)."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    a, b, c, d, key, other = np.broadcast_arrays(*(np.asarray(word).astype(np.uint64) & low for word in words))
    for _ in range(10):
        x, y = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (y >> half) ^ b ^ key, y & low, (x >> half) ^ d ^ other, x & low
        key, other = (key + np.uint64(0x9E3779B9)) & low, (other + np.uint64(0xBB67AE85)) & low
    return a.astype(np.uint32)
