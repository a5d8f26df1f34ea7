"""The rows of each group times the matrix of the group."""

import jax.numpy as jnp
import numpy as np


def formula(x, facts, options, rounded):
    """o_in = scale_gn Σ_k lhs_ik rhs_gkn with g = group[i], and what is there already for rows of no group (−1)."""
    lhs, rhs = x["lhs"], x["rhs"].swapaxes(1, 2) if options.get("transpose_rhs") else x["rhs"]
    group = facts["group"]
    own = jnp.asarray(group[:, None] == np.arange(rhs.shape[0]), lhs.dtype)  # whether a row is of a group
    o = jnp.einsum("me,mk,ekn->mn", own, lhs, rhs, precision="highest")
    # Both factors of a product are in the dtype of lhs: so is the cotangent of this one, in those of the backward.
    o = rounded.cotangent(o)
    if "rhs_scale" in x:
        scale = x["rhs_scale"]
        scale = scale.reshape(rhs.shape[0] if scale.ndim else 1, -1)
        o = o * (own @ jnp.broadcast_to(scale, (rhs.shape[0], scale.shape[1])))
    return [jnp.where((group >= 0)[:, None], o, x.get("existing_out", 0))]
