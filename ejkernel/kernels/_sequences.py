"""What cu_seqlens say of a packed call, on every platform."""

import jax.numpy as jnp
from jax import Array

from ejkernel.primitives.flash_attention import Operands


def of_sequences(lse: Array, operands: Operands) -> Array:
    """lse [b, h, S], −∞ outside of the sequences of a packed call, where sinks count for nothing either."""
    if operands.cu_seqlens_q is None or operands.sinks is None:
        return lse
    token, cuts = jnp.arange(lse.shape[2], dtype=jnp.int32), operands.cu_seqlens_q
    inside = (token >= cuts[:, :1]) & (token < cuts[:, -1:])
    return jnp.where(inside[:, None], lse, -jnp.inf)
