"""A step of serving: its keys and values go into the pool, and each token attends to what its sequence has there."""

import jax.numpy as jnp
import numpy as np


def formula(x, facts, options, rounded):
    """o, lse, and the pool."""
    q, k, v, pool = x["q"], x["k"], x["v"], x["kv_pages"]
    (_, H, D), groups = q.shape, k.shape[1]
    places = pool.reshape(-1, groups, 2, D)
    writes = jnp.asarray(facts["writes"], q.dtype)  # [places, T]: whether a token is written there
    new = jnp.einsum("pt,tgcd->pgcd", writes, jnp.concatenate([k[:, :, None], v[:, :, None]], 2), precision="highest")
    places = jnp.where(facts["writes"].any(1)[:, None, None, None], new, places)
    of = jnp.asarray(facts["slots"], q.dtype)  # [T, positions, places]: where a position of its sequence is
    keys, values = (jnp.repeat(jnp.einsum("tjp,pgd->tjgd", of, places[:, :, i]), H // groups, axis=2) for i in (0, 1))
    scale = options.get("softmax_scale")
    s = rounded(jnp.einsum("thd,tjhd->thj", q, keys, precision="highest")) * (D**-0.5 if scale is None else scale)
    cap = options.get("softcap")
    s = jnp.where(facts["visible"][:, None], s if cap is None else cap * jnp.tanh(s / cap), -jnp.inf)
    sinks = jnp.full((1, H, 1), -jnp.inf, s.dtype)
    if "sinks" in x:
        sinks = jnp.where(facts["inside"][:, None, None], x["sinks"].reshape(1, H, -1), -jnp.inf)
    top = jnp.maximum(s.max(-1), sinks.max(-1))
    top = jnp.where(top == -jnp.inf, 0, top)[..., None]
    weights = jnp.exp(s - top)
    total = weights.sum(-1) + jnp.exp(sinks - top).sum(-1)
    p = weights / jnp.where(total == 0, 1, total)[..., None]
    o = rounded(jnp.einsum("thj,tjhd->thd", rounded(p), values, precision="highest"))
    lse = jnp.where(total == 0, -jnp.inf, top[..., 0] + jnp.log(jnp.where(total == 0, 1, total)))
    pool = jnp.where(facts["unread"][:, None, None, None], np.nan, places).reshape(pool.shape)
    return [o, lse, pool] if options.get("return_lse") else [o, pool]
