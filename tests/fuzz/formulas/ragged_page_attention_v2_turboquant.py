"""Each token attends over the keys and values that bytes and norms of its sequence's pages stand for."""

import jax.numpy as jnp
import numpy as np

from ._cache import attention, keys_and_values


def formula(x, facts, options, rounded):
    """o, and lse where it is asked for."""
    books = [(facts[f"{name}_entries"], x[f"{name}_codebook"]) for name in ("key", "value")]
    c, c_v = (jnp.einsum("pzgdk,k->pzgd", jnp.asarray(of, book.dtype), book, precision="highest") for of, book in books)
    signs = jnp.asarray(facts["signs"], c.dtype)
    pools = dequantised(c, signs, x["key_norms_pages"], c_v, x["value_norms_pages"], x)
    keys, values = keys_and_values(*pools, x, facts["pages"])
    o, lse = attention(x["q"], keys, values, x, facts, options, rounded)
    return [o, lse] if options.get("return_lse") else [o]


def dequantised(c, signs, key_norms, c_v, value_norms, x):
    """‖k‖·Πᵀ(c + √(π/2e)·‖r‖·Sᵀs) and ‖v‖·Πᵀc."""
    projection, rotation = x["qjl_projection"], x["rotation_matrix"]
    factor = np.sqrt(np.pi / 2 / projection.shape[0])
    r = factor * key_norms[..., 1:] * jnp.einsum("...e,ed->...d", signs, projection, precision="highest")
    rotated = key_norms[..., :1] * (c + r), value_norms[..., None] * c_v
    return [jnp.einsum("...e,ed->...d", a, rotation, precision="highest") for a in rotated]
