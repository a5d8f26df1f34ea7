"""The mean of the tokens of each sequence."""

import jax.numpy as jnp


def formula(x, facts, options, rounded):
    """o_n = Σ_t share_nt x_t, where share is 1 / length of n for its tokens and 0 for others."""
    x = x["x"]
    if "share" in facts:
        return [rounded(jnp.einsum("nt,td->nd", jnp.asarray(facts["share"], x.dtype), x, precision="highest"))]
    return [rounded(x.sum(1) / max(x.shape[1], 1))]
