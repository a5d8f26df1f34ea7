"""Masking by the cu_seqlens of packed calls, for all platforms."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.flash_attention import Operands


def of_sequences(lse: Array, operands: Operands) -> Array:
    """lse [b, h, S] with −∞ for tokens outside the sequences of a packed call, whatever sinks there are."""
    if operands.cu_seqlens_q is None or operands.sinks is None:
        return lse
    token, cuts = jnp.arange(lse.shape[2], dtype=jnp.int32), operands.cu_seqlens_q
    inside = (token >= cuts[:, :1]) & (token < cuts[:, -1:])
    return jnp.where(inside[:, None], lse, -jnp.inf)
