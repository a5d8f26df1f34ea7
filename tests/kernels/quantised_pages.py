"""Steps over pages quantised by TurboQuant, and what they compute by the definition, in float64 from the bytes."""

import jax.numpy as jnp
import numpy as np

from ejkernel.quantization.turboquant.codebook import solve_lloyd_max

from .paged import COUNT, PAGE, RAGGED_CONTEXTS, RAGGED_LENGTHS, TOKENS, hidden_slots, ragged_defined, wide

D, ROWS, BITS = 16, 24, 3
POOLS = ("key_indices_pages", "key_signs_pages", "key_norms_pages", "value_indices_pages", "value_norms_pages")
NORMS = tuple(name for name in POOLS if "norms" in name)
MATRICES = ("rotation_matrix", "qjl_projection", "key_codebook", "value_codebook")


def step(
    h=6, g=2, dtype="float32", norms="bfloat16", bits=BITS, seed=0, d=D, rows=ROWS, page=PAGE,
    contexts=RAGGED_CONTEXTS, lengths=RAGGED_LENGTHS, count=COUNT, tokens=TOKENS, sinks=None, columns=None,
):  # fmt: skip
    """Arguments of both operations, and the keys and values of the third version: no page is shared."""
    rng, n, columns = np.random.default_rng(seed), len(contexts), columns or -(-max(contexts) // page)
    normal = lambda *shape: rng.standard_normal(shape)
    any_bytes = lambda *last: jnp.asarray(rng.integers(0, 256, (n * columns, page, g, *last)), jnp.uint8)
    positive = lambda *last: jnp.asarray(rng.uniform(0.5, 2, (n * columns, page, g, *last)), norms)
    pools = any_bytes(d // 2), any_bytes(rows // 8), positive(2), any_bytes(d // 2), positive()
    matrices = (
        np.linalg.qr(normal(d, d))[0],
        normal(rows, d) / rows**0.5,
        solve_lloyd_max(bits - 1, d).centroids,
        solve_lloyd_max(bits, d).centroids,
    )
    x = dict(
        q=jnp.asarray(normal(tokens, h, d), dtype),
        context_lens=jnp.asarray(contexts, jnp.int32),
        block_tables=jnp.asarray(rng.permutation(n * columns).reshape(n, columns), jnp.int32),
        query_start_loc=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        num_seqs=jnp.array([count]),
    )
    x |= dict(zip(POOLS, pools, strict=True))
    x |= {name: jnp.asarray(a, jnp.float32) for name, a in zip(MATRICES, matrices, strict=True)}
    if sinks:
        x["sinks"] = jnp.asarray(normal(*sinks), jnp.float32)
    return x, {name: jnp.asarray(normal(tokens, g, d), dtype) for name in ("k", "v")}


def nibbles(x):
    x = np.asarray(x)
    return np.stack([x % 16, x // 16], -1).reshape(*x.shape[:-1], -1)


def bits_of(x):
    return np.unpackbits(np.asarray(x), axis=-1, bitorder="little").astype(bool)


def dequantised(x):
    """The pool [P, page, 2G, D] in float64, dequantised from the bytes."""
    rotation, projection, *codebooks = (wide(x[name]) for name in MATRICES)
    of = lambda name, book: book[np.minimum(nibbles(x[f"{name}_indices_pages"]), len(book) - 1)]
    c, c_v = (of(name, book) for name, book in zip(("key", "value"), codebooks, strict=True))
    norm, residual = np.moveaxis(wide(x["key_norms_pages"]), -1, 0)[..., None]
    signs, factor = np.where(bits_of(x["key_signs_pages"]), 1, -1), np.sqrt(np.pi / 2 / len(projection))
    k = norm * (c + factor * residual * (signs @ projection)) @ rotation
    v = wide(x["value_norms_pages"])[..., None] * c_v @ rotation
    return np.stack([k, v], 3).reshape(*k.shape[:2], -1, k.shape[3])


def defined(x, **options):
    """o and lse of either operation over the pools as they are."""
    return ragged_defined(x | dict(kv_pages=dequantised(x)), **options)


def unread_slots(x, window=None):
    """[P, page]: the slots that no token of a step sees."""
    return hidden_slots(x | dict(pages=x["value_norms_pages"]), window)


def poisoned(norms, slots):
    """Norms, NaN in some slots."""
    return jnp.where(slots.reshape(*slots.shape, *(1,) * (norms.ndim - 2)), jnp.nan, norms)


def with_strangers(x, window=None):
    """NaN in what nothing reads: norms of slots that no token sees, tokens of no sequence; any numbers in tables."""
    slots, page = unread_slots(x, window), x["value_norms_pages"].shape[1]
    (n, columns), count = x["block_tables"].shape, int(np.reshape(x["num_seqs"], ()))
    starts, in_use = np.asarray(x["query_start_loc"]), np.arange(n) < count
    contexts = np.where(in_use & (np.diff(starts) > 0), np.asarray(x["context_lens"]), 0)[:, None]
    strange = np.resize([-1, 2**31 - 1, -(2**31), 7, 10**6], columns)
    of_some = (np.arange(len(x["q"])) < starts[count])[:, None, None]
    return (
        x
        | {name: poisoned(x[name], slots) for name in NORMS}
        | dict(
            q=jnp.where(of_some, x["q"], jnp.nan),
            context_lens=jnp.where(in_use, x["context_lens"], -7),
            block_tables=jnp.where(np.arange(columns) < -(-contexts // page), x["block_tables"], strange),
            query_start_loc=jnp.where(np.arange(n + 1) <= count, x["query_start_loc"], -3),
        )
    )
