"""Steps of multi_latent_page_attention, and its definition in float64, one token of one sequence at a time."""

import jax.numpy as jnp
import numpy as np

from .paged import attended, in_pages, keys_of

P, J, PAGE, TOKENS, LATENT, ROPE = 20, 5, 8, 30, 24, 8
CONTEXTS, LENGTHS, COUNT = (17, 40, 1, 33, 3, 8), (9, 1, 1, 0, 5, 4), 5


def step(h=4, dtype="float32", pages="float32", seed=0, latent=LATENT, rope=ROPE, page=PAGE, scale=1):
    """Arguments: prefill, decode, and a sequence without tokens; contexts and pages are `scale` times as long."""
    rng = np.random.default_rng(seed)
    return dict(
        q_latent=jnp.asarray(rng.standard_normal((TOKENS, h, latent)), dtype),
        q_rope=jnp.asarray(rng.standard_normal((TOKENS, h, rope)), dtype),
        pages=in_pages(rng.standard_normal((P, page * scale, latent + rope)), pages),
        context_lens=jnp.array(CONTEXTS) * scale * page // PAGE,
        block_tables=jnp.asarray(rng.integers(0, P, (len(CONTEXTS), J)), jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32),
        num_seqs=jnp.array([COUNT]),
    )


def tree(drafts, seed=1):
    """[TOKENS, drafts] bool."""
    return jnp.asarray(np.random.default_rng(seed).random((TOKENS, drafts)) < 0.5)


def lists(keys, x, seed=2):
    """[TOKENS, keys] positions, some past the token's own or outside its sequence, and some twice."""
    rng, length = np.random.default_rng(seed), J * x["pages"].shape[1]
    strange = rng.choice([-1, -(2**31), 2**31 - 1, length], (TOKENS, keys))
    found = np.where(rng.random((TOKENS, keys)) < 0.2, strange, rng.integers(0, length // 2, (TOKENS, keys)))
    found[3] = -1
    return jnp.asarray(found, jnp.int32)


def defined(x, window=None, num_splits=None, **options):
    """o and lse by the definition."""
    q = np.concatenate([np.asarray(x["q_latent"]), np.asarray(x["q_rope"])], axis=-1)
    latent, contexts = x["q_latent"].shape[2], np.asarray(x["context_lens"])
    o, lse = np.zeros(x["q_latent"].shape), np.full(q.shape[:2], -np.inf)
    for n in range(int(np.ravel(x["num_seqs"])[0])):
        begin, end = (int(x["query_start_loc"][n + i]) for i in range(2))
        keys = keys_of(x["pages"][:, :, None], x.get("k_scale"), x["block_tables"][n])
        j, cached = np.arange(len(keys)), contexts[n] - (end - begin)
        for token in range(begin, end):
            position = cached + token - begin
            if position < 0:
                continue
            seen = j <= position
            if "draft_mask" in x:
                told = [new for new in np.flatnonzero(x["draft_mask"][token]) if new < end - begin]
                seen = (j < cached) | np.isin(j, cached + np.array(told, int))
            seen &= j > position - (window or len(keys))
            if "indices" in x:
                named = np.asarray(x["indices"][token])
                named = named[(named >= 0) & (named < len(keys))]
                seen = named[seen[named]]
            o[token], lse[token] = attended(q[token], keys, keys[..., :latent], seen, x.get("sinks"), **options)
    return o, lse


def poisoned(x):
    """The arguments with a pool in which every sequence has its own pages, and the same with NaN in unread entries:
    slots past the contexts and tokens of no sequence, with any numbers in the tables past their contexts.
    """
    n, (_, page, width) = len(CONTEXTS), x["pages"].shape
    pool = np.random.default_rng(0).standard_normal((n * J, page, width))
    x = x | dict(block_tables=jnp.arange(n * J, dtype=jnp.int32).reshape(n, J))
    x |= dict(pages=jnp.asarray(pool, x["pages"].dtype))
    contexts, has_tokens = np.asarray(x["context_lens"])[:, None], (np.arange(n) < COUNT)[:, None]
    used, held = (np.arange(J * page) < contexts) & has_tokens, (np.arange(J) < -(-contexts // page)) & has_tokens
    inside = (np.arange(TOKENS) < sum(LENGTHS[:COUNT]))[:, None, None]
    with_nan = dict(
        pages=jnp.where(used.reshape(n * J, page, 1), x["pages"], jnp.nan),
        block_tables=jnp.where(held, x["block_tables"], jnp.array([-1, 2**31 - 1, -(2**31), 7, n * J])),
        **{name: jnp.where(inside, x[name], jnp.nan) for name in ("q_latent", "q_rope")},
    )
    return x, x | with_nan


def unnamed(x, indices):
    """The arguments with a pool in which every sequence has its own pages, and these lists, and the same with NaN in
    all slots that no list names.
    """
    x, _ = poisoned(x)
    x |= dict(indices=indices)
    page, starts, contexts = x["pages"].shape[1], np.asarray(x["query_start_loc"]), np.asarray(x["context_lens"])
    is_named = np.zeros((len(CONTEXTS), J * page), bool)
    for n in range(COUNT):
        for token in range(starts[n], starts[n + 1]):
            named = np.asarray(indices[token])
            is_named[n, named[(named >= 0) & (named <= contexts[n] - starts[n + 1] + token)]] = True
    return x, x | dict(pages=jnp.where(is_named.reshape(-1, page, 1), x["pages"], jnp.nan))
