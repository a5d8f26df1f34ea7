"""Decays of a recurrence over a block of tokens, as exponentials of sums of log decays."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._attention import where


class Decay(NamedTuple):
    """The decays of a block of c tokens, None if the gate is absent.

    With D_ij = Σ_{j<l≤i} g_l and P_i = Σ_{l≤i} g_l,
    between: exp(D_ij) at [:,:,i,j], 1 for j ≥ i. since: exp(P_i) at i. until: exp(D_cj) at j. total: exp(P_c).
    """

    between: Array | None = None
    since: Array | None = None
    until: Array | None = None
    total: Array | None = None


def decay_of(gate: Array | None, dtype: Any) -> Decay:
    """The decays of a gate [b,h,c,…]; each D_ij is summed separately, not as P_i − P_j (see `_recurrence`)."""
    if gate is None:
        return Decay()
    gate = gate.astype(dtype)
    after = np.tri(gate.shape[2], k=-1, dtype=bool)  # token l comes after token j
    terms = jnp.broadcast_to(gate[:, :, :, None], (*gate.shape[:3], gate.shape[2], *gate.shape[3:]))
    after = after.reshape(1, 1, *after.shape, *(1,) * (gate.ndim - 3))
    between = lax.cumsum(where(after, terms, 0), axis=2)
    since = between[:, :, :, 0] + gate[:, :, :1]
    return Decay(*map(jnp.exp, (between, since, between[:, :, -1], since[:, :, -1])))


def times(a: Array, decay: Array | None) -> Array:
    """a · decay, where the decay may lack the last axes of a; a itself for a decay of None."""
    return a if decay is None else a * lax.expand_dims(decay, range(decay.ndim, a.ndim))
