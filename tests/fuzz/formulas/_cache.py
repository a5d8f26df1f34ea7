"""Attention of each query over its own keys, shared by the operations over a cache."""

import jax.numpy as jnp
import numpy as np


def attention(q, keys, values, x, facts, options, rounded):
    """o [T,H,V] and lse [T,H] of q [T,H,D] over keys [T,J,G,D] and values [T,J,G,V], of which `visible` [T,J] are
    seen; queries that are not `inside` [T] see nothing, no sinks either.
    """
    H, D = q.shape[1:]
    keys, values = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (keys, values))
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
    return o, jnp.where(total == 0, -jnp.inf, top[..., 0] + jnp.log(jnp.where(total == 0, 1, total)))


def keys_and_values(k_pages, v_pages, x, pages):
    """[N,J·page,G,·] of pools [P,page,G,·], times their scales, by the pages [N,J] of each query's sequence."""
    found = []
    for pool, name in ((k_pages, "k_scale"), (v_pages, "v_scale")):
        pool = pool * x[name][..., None] if name in x else pool
        is_of = jnp.asarray(pages[:, :, None] == np.arange(pool.shape[0]), pool.dtype)
        found.append(jnp.einsum("njp,pzgd->njzgd", is_of, pool, precision="highest"))
    return [a.reshape(a.shape[0], -1, *a.shape[3:]) for a in found]
