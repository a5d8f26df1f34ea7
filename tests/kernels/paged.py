"""The definition of attention over pages, in float64 and one query at a time, and steps for tests."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla._pages import ragged_queries, visible
from ejkernel.primitives._pages import CacheSpec

# Of steps of decoding: the arguments of sequences, how many these are, pages of the pool and of a sequence, contexts.
MOVING = ("q", "context_lens", "block_tables")
N, P, J, CONTEXTS = 6, 20, 5, (0, 1, 17, 40, 8, 33)
DTYPES = {"float8_e4m3fn": jnp.float8_e4m3fn, "int8": jnp.int8}


def wide(x):
    return np.asarray(x).astype(np.float64)


def keys_of(pages, scale, table):
    """[positions, G, ·] of the sequence with this table, times its factors."""
    pages = wide(pages)
    if scale is not None:
        pages = pages * np.broadcast_to(wide(scale), pages.shape[:3])[..., None]
    found = pages[np.clip(np.asarray(table, np.int64), 0, len(pages) - 1)]
    return found.reshape(-1, *found.shape[2:])


def attended(q, k, v, seen, sinks=None, softcap=None, softmax_scale=None):
    """o [H,V] and lse [H] of one query [H,D] over the keys [J,G,D] that are seen [J]."""
    scale, repeat = q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale, q.shape[0] // k.shape[1]
    o, lse = np.zeros((len(q), v.shape[2])), np.full(len(q), -np.inf)
    for h, row in enumerate(wide(q)):
        s = scale * k[seen, h // repeat] @ row
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        all_logits = s if sinks is None else np.append(s, wide(sinks)[h])
        if all_logits.size:
            lse[h] = np.logaddexp.reduce(all_logits)
            o[h] = np.exp(s - lse[h]) @ v[seen, h // repeat]
    return o, lse


def in_pages(x, dtype):
    """Numbers rounded to integers if pages hold these."""
    return jnp.asarray(np.round(4 * x) if dtype == "int8" else x, DTYPES.get(dtype, dtype))


def close(found, wanted, tolerance=1e-6):
    found, wanted = wide(found), wide(wanted)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite])
    error = np.abs(found[finite] - wanted[finite]).max(initial=0)
    assert error <= tolerance * max(1, np.abs(wanted[finite]).max(initial=0)), error


def decode_step(h=6, g=2, d=16, e=24, page=8, dtype="float32", pages="float32", seed=0):
    """Arguments of page_attention."""
    rng = np.random.default_rng(seed)
    return dict(
        q=jnp.asarray(rng.standard_normal((N, h, d)), dtype),
        k_pages=in_pages(rng.standard_normal((P, page, g, d)), pages),
        v_pages=in_pages(rng.standard_normal((P, page, g, e)), pages),
        context_lens=jnp.asarray(CONTEXTS, jnp.int32) * page // 8,
        block_tables=jnp.asarray(rng.integers(0, P, (N, J)), jnp.int32),
    )


def decode_defined(x, window=None, num_splits=None, **options):
    """o and lse of page_attention by its definition."""
    o, lse = [], []
    scales = [x.get(name) for name in ("k_scale", "v_scale")]
    for n, q in enumerate(x["q"]):
        context, table = int(x["context_lens"][n]), x["block_tables"][n]
        k, v = (keys_of(x[name], scale, table) for name, scale in zip(("k_pages", "v_pages"), scales, strict=True))
        j = np.arange(len(k))
        seen = (j < context) & (j >= context - (window or context))
        sinks = None if context == 0 else x.get("sinks")
        found = attended(np.asarray(q), k, v, seen, sinks, **options)
        o.append(found[0]), lse.append(found[1])
    return np.stack(o), np.stack(lse)


# Of steps of prefill and decode: slots of a page, tokens, contexts and tokens of the sequences, of which so many count.
PAGE, TOKENS, COUNT = 8, 30, 5
RAGGED_CONTEXTS, RAGGED_LENGTHS = (17, 40, 1, 33, 3, 8), (9, 1, 1, 0, 5, 4)  # the fifth has more tokens than keys


def ragged_step(h=6, g=2, d=16, dtype="float32", pages="float32", seed=0, contexts=RAGGED_CONTEXTS, page=PAGE):
    """Arguments of ragged_page_attention."""
    rng = np.random.default_rng(seed)
    return dict(
        q=jnp.asarray(rng.standard_normal((TOKENS, h, d)), dtype),
        kv_pages=in_pages(rng.standard_normal((P, page, 2 * g, d)), pages),
        context_lens=jnp.array(contexts),
        block_tables=jnp.asarray(rng.integers(0, P, (len(contexts), J)), jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *RAGGED_LENGTHS]), jnp.int32),
        num_seqs=jnp.array([COUNT]),
    )


def ragged(lengths, contexts, h=4, g=2, d=16, page=8, drafts=0, seed=0):
    """Arguments of ragged_page_attention for sequences of so many tokens and keys."""
    rng, n, columns = np.random.default_rng(seed), len(lengths), -(-max(contexts) // page)
    pages = n * columns
    x = dict(
        q=rng.standard_normal((sum(lengths) + 3, h, d)),
        kv_pages=rng.standard_normal((pages, page, 2 * g, d)),
        context_lens=np.asarray(contexts),
        block_tables=rng.permutation(pages).reshape(n, columns),
        query_start_loc=np.cumsum([0, *lengths]),
        num_seqs=np.asarray([n]),
    )
    if drafts:
        x["draft_mask"] = rng.random((len(x["q"]), drafts)) < 0.6
    return {name: jnp.asarray(a, jnp.float32 if a.dtype == float else None) for name, a in x.items()}


def ragged_defined(x, window=None, num_splits=None, batch_invariant=False, tokens=None, **options):
    """o and lse by the definition, one token of one sequence at a time; of the named tokens only, if there are some."""
    o, lse = np.zeros(x["q"].shape), np.full(x["q"].shape[:2], -np.inf)
    pools = [x["kv_pages"][:, :, n::2] for n in range(2)]
    for n in range(int(np.reshape(x["num_seqs"], ()))):
        begin, end = (int(x["query_start_loc"][n + i]) for i in range(2))
        context, table = int(x["context_lens"][n]), x["block_tables"][n]
        k, v = (keys_of(pool, x.get(name), table) for pool, name in zip(pools, ("k_scale", "v_scale"), strict=True))
        j, cached = np.arange(len(k)), context - (end - begin)
        for token in range(begin, end):
            position = cached + token - begin
            if position < 0 or (tokens is not None and token not in tokens):
                continue
            seen = j <= position
            if "draft_mask" in x:
                told = [new for new in np.flatnonzero(x["draft_mask"][token]) if new < end - begin]
                seen = (j < cached) | np.isin(j, cached + np.array(told, int))
            seen &= j > position - (window or len(k))
            o[token], lse[token] = attended(np.asarray(x["q"][token]), k, v, seen, x.get("sinks"), **options)
    return o, lse


def hidden_slots(x, window=None):
    """[P, page]: the slots that no token of a ragged step sees; each page belongs to one sequence."""
    pool = x["kv_pages"] if "kv_pages" in x else x["pages"]
    step = SimpleNamespace(**{"draft_mask": None, "sinks": None} | x)
    step.num_seqs, length = jnp.reshape(step.num_seqs, (1,)), x["block_tables"].shape[1] * pool.shape[1]
    tokens = x["q"] if "q" in x else x["q_latent"]
    queries = ragged_queries(step, tokens, pool.shape[1], CacheSpec(softmax_scale=1.0, window=window))
    position = jnp.broadcast_to(jnp.arange(length)[None], (len(tokens), length))
    pages = x["block_tables"][queries.sequence]
    slots = (pages[:, :, None] * pool.shape[1] + jnp.arange(pool.shape[1])).reshape(position.shape)
    seen = np.zeros(pool.shape[0] * pool.shape[1], bool)
    seen[np.asarray(slots)[np.asarray(visible(queries, position))]] = True
    return ~seen.reshape(pool.shape[:2])
