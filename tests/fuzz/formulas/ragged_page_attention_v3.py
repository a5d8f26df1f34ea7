"""A step of serving: its keys and values go into the pool, and each token attends to what its sequence has there."""

import jax.numpy as jnp
import numpy as np

from ._cache import attention


def formula(x, facts, options, rounded):
    """o, lse, and the pool."""
    q, k, v, pool = x["q"], x["k"], x["v"], x["kv_pages"]
    places = pool.reshape(-1, k.shape[1], 2, q.shape[2])
    writes = jnp.asarray(facts["writes"], q.dtype)  # [places, T]: whether a token is written there
    new = jnp.einsum("pt,tgcd->pgcd", writes, jnp.concatenate([k[:, :, None], v[:, :, None]], 2), precision="highest")
    places = jnp.where(facts["writes"].any(1)[:, None, None, None], new, places)
    of = jnp.asarray(facts["slots"], q.dtype)  # [T, positions, places]: where a position of its sequence is
    keys, values = (jnp.einsum("tjp,pgd->tjgd", of, places[:, :, i]) for i in (0, 1))
    o, lse = attention(q, keys, values, x, facts, options, rounded)
    pool = jnp.where(facts["unread"][:, None, None, None], np.nan, places).reshape(pool.shape)
    return [o, lse, pool] if options.get("return_lse") else [o, pool]
