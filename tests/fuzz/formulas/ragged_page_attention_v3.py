"""A step over a paged cache: every token attends over the slots of the pool that hold its sequence so far."""

import jax.numpy as jnp
import numpy as np


def formula(x, facts, options, rounded):
    """o, lse if asked for, and the pool. `writes` [slot, token] and `sees` [token, slot] are 0 or 1."""
    q, (pages, page, _, depth), groups = x["q"], x["kv_pages"].shape, x["k"].shape[1]
    pool, writes = x["kv_pages"].reshape(-1, groups, 2, depth), jnp.asarray(facts["writes"], q.dtype)
    new = [jnp.einsum("pt,tgd->pgd", writes, x[name], precision="highest") for name in "kv"]
    old = [pool[:, :, n : n + 1].reshape(-1, groups, depth) for n in range(2)]
    written = facts["writes"].any(1)[:, None, None]
    kv = [jnp.where(written, a, b) for a, b in zip(new, old, strict=True)]
    k, v = (jnp.repeat(a, q.shape[1] // groups, axis=1) for a in kv)
    scale = options.get("softmax_scale")
    s = rounded(jnp.einsum("thd,phd->thp", q, k, precision="highest")) * (depth**-0.5 if scale is None else scale)
    cap = options.get("softcap")
    s = s if cap is None else cap * jnp.tanh(s / cap)
    s = jnp.where(facts["sees"][:, None], s, -jnp.inf)
    valid = facts["valid"][:, None]
    sinks = x["sinks"].reshape(1, q.shape[1], -1) if "sinks" in x else jnp.full((1, 1, 1), -jnp.inf, s.dtype)
    top = jnp.maximum(s.max(-1, initial=-jnp.inf), sinks.max(-1))
    top = jnp.where(top == -jnp.inf, 0, top)[..., None]
    weights = jnp.exp(s - top)
    total = weights.sum(-1) + jnp.exp(sinks - top).sum(-1)
    total = jnp.where(total == 0, 1, total)
    o = rounded(jnp.einsum("thp,phd->thd", rounded(weights / total[..., None]), v, precision="highest"))
    o, lse = jnp.where(valid[..., None], o, 0), jnp.where(valid, top[..., 0] + jnp.log(total), -jnp.inf)
    pool = jnp.concatenate([a[:, :, None] for a in kv], axis=2).reshape(pages, page, 2 * groups, depth)
    return [o, lse, pool] if options.get("return_lse") else [o, pool]


def slots(x, page: int, pages: int, window: int | None):
    """(valid [token], writes [slot, token], sees [token, slot]) of a step's tables."""
    tokens, count = x["q"].shape[0], int(np.clip(x["num_seqs"], 0, len(x["context_lens"]))[0])
    starts, tables = x["query_start_loc"].astype(int), x["block_tables"].astype(int)
    valid = np.zeros(tokens, bool)
    writes, sees = np.zeros((pages * page, tokens), bool), np.zeros((tokens, pages * page), bool)
    slot = lambda n, j: tables[n, j // page] * page + j % page
    for n in range(count):
        new = range(starts[n], starts[n + 1])
        for t in new:
            position = int(x["context_lens"][n]) - len(new) + t - starts[n]
            if position >= 0:
                valid[t] = writes[slot(n, position), t] = True
                first = 0 if window is None else max(0, position - window + 1)
                sees[t, [slot(n, j) for j in range(first, position + 1)]] = True
    return valid, writes, sees
