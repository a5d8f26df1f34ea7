"""A step of serving: its keys and values become bytes and norms in the pools, for which each token then attends."""

import jax.numpy as jnp

from ._cache import attention
from .ragged_page_attention_v2_turboquant import dequantised


def formula(x, facts, options, rounded):
    """o, lse, and the five pools."""
    (p, z, g, _), dtype = x["key_norms_pages"].shape, x["q"].dtype
    writes = jnp.asarray(facts["writes"], dtype)  # [places, T]: whether a token is written there
    is_written = facts["writes"].any(1)

    def pool(old, new):
        """[places, G, ·] with the rows [T, G, ·] of the step."""
        new = jnp.einsum("pt,tgd->pgd", writes, new, precision="highest")
        return jnp.where(is_written[:, None, None], new, jnp.asarray(old, dtype).reshape(p * z, g, -1))

    def entries(name):
        return jnp.einsum(
            "pzgdk,k->pzgd", jnp.asarray(facts[f"{name}_entries"], dtype), x[f"{name}_codebook"], precision="highest"
        )

    y, length = _direction(x["k"], x)
    index, c = _nearest(y, x["key_codebook"])
    r = y - c
    positive = jnp.einsum("tgd,ed->tge", r, x["qjl_projection"], precision="highest") >= 0
    y, length_v = _direction(x["v"], x)
    index_v, c_v = _nearest(y, x["value_codebook"])
    norms = jnp.concatenate([length, jnp.sqrt((r * r).sum(-1, keepdims=True))], -1)
    norms = pool(x["key_norms_pages"], _stored(norms, facts["dtype of key_norms_pages"]))
    norms_v = pool(x["value_norms_pages"], _stored(length_v, facts["dtype of value_norms_pages"]))
    bits = jnp.where(positive, 1.0, 0.0).astype(dtype)
    signs = pool(facts["signs"], 2 * bits - 1)
    rows = pool(entries("key"), c), signs, norms, pool(entries("value"), c_v), norms_v[..., 0]
    keys, values = dequantised(*rows, x)
    of = jnp.asarray(facts["slots"], dtype)  # [T, positions, places]: where a position of its sequence is
    keys, values = (jnp.einsum("tjp,pgd->tjgd", of, a, precision="highest") for a in (keys, values))
    o, lse = attention(x["q"], keys, values, x, facts, options, rounded)
    packed = [
        pool(facts["key_indices_pages"], _packed(index, 2, 16)),
        pool(facts["key_signs_pages"], _packed(bits, 8, 2)),
        pool(facts["value_indices_pages"], _packed(index_v, 2, 16)),
    ]
    norms, norms_v = (jnp.where(facts["unread"][:, None, None], jnp.nan, a) for a in (norms, norms_v))
    in_pages = lambda a: a.reshape(p, z, g, -1)
    pools = [packed[0], packed[1], norms, packed[2]]
    pools = [*map(in_pages, pools), in_pages(norms_v)[..., 0]]
    return [o, lse, *pools] if options.get("return_lse") else [o, *pools]


def _direction(k, x):
    """Π·k / ‖k‖, 0 where k is, and ‖k‖; of numbers whose squares would vanish, too."""
    largest = jnp.abs(k).max(-1, keepdims=True)
    k = k / jnp.where(largest == 0, 1, largest)
    length = jnp.sqrt((k * k).sum(-1, keepdims=True))
    k = k / jnp.where(length == 0, 1, length)
    return jnp.einsum("tgd,ed->tge", k, x["rotation_matrix"], precision="highest"), largest * length


def _nearest(y, book):
    """The index and the entry, of two that are as near the first."""
    index, entry = jnp.zeros_like(y), jnp.zeros_like(y) + book[0]
    for n in range(1, book.shape[0]):
        nearer = jnp.abs(y - book[n]) < jnp.abs(y - entry)
        index, entry = jnp.where(nearer, n, index), jnp.where(nearer, book[n], entry)
    return index, entry


def _packed(x, count, base):
    """Numbers below `base`, so many in a byte, the first in the lowest bits."""
    parts = x.reshape(*x.shape[:-1], -1, count)
    return sum(parts[..., n] * float(base**n) for n in range(count))


def _stored(norms, like):
    """As the pool keeps them."""
    return norms.astype(like.dtype).astype(norms.dtype)
