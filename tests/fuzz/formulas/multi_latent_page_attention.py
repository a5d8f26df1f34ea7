"""Each token of a step attends over the latents of its sequence, or those in its list: keys and values of all heads."""

import jax.numpy as jnp
import numpy as np

from ._cache import attention, keys_and_values


def formula(x, facts, options, rounded):
    """o, and lse where it is asked for."""
    q, pool = jnp.concatenate([x["q_latent"], x["q_rope"]], -1), x["pages"][:, :, None]
    keys, values = keys_and_values(pool, pool, {"v_scale": x["k_scale"], **x} if "k_scale" in x else x, facts["pages"])
    if "listed" in facts:
        is_of = jnp.asarray(facts["positions"][:, :, None] == np.arange(keys.shape[1]), keys.dtype)
        keys, values = (jnp.einsum("tkj,tjgd->tkgd", is_of, a, precision="highest") for a in (keys, values))
        facts = facts | {"visible": facts["listed"]}
    o, lse = attention(q, keys, values[..., : x["q_latent"].shape[-1]], x, facts, options, rounded)
    return [o, lse] if options.get("return_lse") else [o]
